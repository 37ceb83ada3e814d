
# Reserve the huge pages and give the devices to vfio-pci. Needs root.
prepare() {
  local line node size pages directory free device driver
  for line in "${huge_pages[@]}"; do
    read -r node size pages <<<"$line"
    directory=/sys/devices/system/node/node$node/hugepages/hugepages-${size}kB
    free=$(<"$directory/free_hugepages")
    if ((free < pages)); then
      echo $(($(<"$directory/nr_hugepages") + pages - free)) >"$directory/nr_hugepages"
      free=$(<"$directory/free_hugepages")
    fi
    if ((free < pages)); then
      echo "node $node: expected $pages free pages of $size kB, found $free" >&2
      return 1
    fi
  done
  if ((${#devices[@]})); then modprobe vfio-pci; fi
  for device in "${devices[@]}"; do
    directory=/sys/bus/pci/devices/$device
    if [[ ! -d $directory ]]; then
      echo "device $device: not on this host" >&2
      return 1
    fi
    driver=
    if [[ -e $directory/driver ]]; then driver=$(basename "$(readlink -f "$directory/driver")"); fi
    if [[ $driver == vfio-pci ]]; then continue; fi
    echo vfio-pci >"$directory/driver_override"
    if [[ -n $driver ]]; then echo "$device" >"$directory/driver/unbind"; fi
    echo "$device" >/sys/bus/pci/drivers_probe
  done
}

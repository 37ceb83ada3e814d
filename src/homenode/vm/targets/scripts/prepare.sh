
# Reserve the huge pages and give the devices to vfio-pci. Needs root.
prepare() {
  local line node size pages folder free device driver
  for line in "${huge_pages[@]}"; do
    read -r node size pages <<<"$line"
    folder=/sys/devices/system/node/node$node/hugepages/hugepages-${size}kB
    free=$(<"$folder/free_hugepages")
    if ((free < pages)); then
      echo $(($(<"$folder/nr_hugepages") + pages - free)) >"$folder/nr_hugepages"
      free=$(<"$folder/free_hugepages")
    fi
    if ((free < pages)); then
      echo "node $node: expected $pages free pages of $size kB, found $free" >&2
      return 1
    fi
  done
  if ((${#devices[@]})); then modprobe vfio-pci; fi
  for device in "${devices[@]}"; do
    folder=/sys/bus/pci/devices/$device
    if [[ ! -d $folder ]]; then
      echo "device $device: not on this host" >&2
      return 1
    fi
    driver=
    if [[ -e $folder/driver ]]; then driver=$(basename "$(readlink -f "$folder/driver")"); fi
    if [[ $driver == vfio-pci ]]; then continue; fi
    echo vfio-pci >"$folder/driver_override"
    if [[ -n $driver ]]; then echo "$device" >"$folder/driver/unbind"; fi
    echo "$device" >/sys/bus/pci/drivers_probe
  done
}

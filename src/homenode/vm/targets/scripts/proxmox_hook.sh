
# In Proxmox's own list, so that no other VM starts with these devices.
reserve() {
  perl -MPVE::QemuServer::PCI -e \
    'my ($seconds, $vmid, $pid, @ids) = @ARGV;
     my @until = $pid ? (undef, $pid) : ($seconds, undef);
     PVE::QemuServer::PCI::reserve_pci_usage(\@ids, $vmid, @until)' \
    "$reserved_s" "$@"
}

release() {
  perl -MPVE::QemuServer::PCI -e 'PVE::QemuServer::PCI::remove_pci_reservation($ARGV[0])' "$1"
}

vmid=${1:?the id of the VM}
case ${2:?the phase} in
  pre-start)
    if ((${#devices[@]})); then reserve "$vmid" 0 "${devices[@]}"; fi
    prepare
    ;;
  post-start)
    pid=$(</run/qemu-server/"$vmid".pid)
    if ((${#devices[@]})); then reserve "$vmid" "$pid" "${devices[@]}"; fi
    pin "$pid"
    ;;
  post-stop)
    if ((${#devices[@]})); then release "$vmid"; fi
    ;;
  *) ;;
esac

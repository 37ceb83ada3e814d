/* Loaded before libnuma: QEMU binds memory to host nodes that this machine does not have, and says
   over QMP to which. */
long mbind(void *at, unsigned long size, int mode, const unsigned long *nodes, unsigned long count,
           unsigned flags) {
    return 0;
}

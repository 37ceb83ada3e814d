/* What xl -N asks of a hypervisor, answered without one: CPUs and nodes are those of two variables.
   Loaded before libxenctrl and libxenstore; struct xen_sysctl_physinfo begins with these six. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
static int open_handle;
static int number(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 1;
}
void *xc_interface_open(void *logger, void *deaf, unsigned flags) { return &open_handle; }
int xc_interface_close(void *handle) { return 0; }
void *xs_open(unsigned long flags) { return &open_handle; }
void xs_close(void *handle) {}
int xs_fileno(void *handle) { return 0; }
void *xs_read(void *handle, uint32_t transaction, const char *path, unsigned *length) { return NULL; }
void *xs_directory(void *h, uint32_t t, const char *path, unsigned *count) { return NULL; }
char *xs_get_domain_path(void *handle, unsigned domid) { return NULL; }
int xc_get_max_cpus(void *handle) { return number("XEN_CPUS"); }
int xc_get_max_nodes(void *handle) { return number("XEN_NODES"); }
int xc_sharing_freed_pages(void *handle) { return 0; }
int xc_sharing_used_frames(void *handle) { return 0; }
int xc_physinfo(void *handle, uint32_t *info) {
    int values[] = {1, number("XEN_CPUS"), number("XEN_CPUS"), number("XEN_CPUS") - 1,
                    number("XEN_NODES"), number("XEN_NODES") - 1};
    for (int i = 0; i < 6; i++) info[i] = values[i];
    return 0;
}
int xc_version(void *handle, int command, void *answer) { return 0; }
/* From Xen 4.20 on, in place of xc_version for texts. */
char *xc_xenver_extraversion(void *handle) { return NULL; }
char *xc_xenver_capabilities(void *handle) { return NULL; }
char *xc_xenver_changeset(void *handle) { return NULL; }
char *xc_xenver_commandline(void *handle) { return NULL; }
char *xc_xenver_buildid(void *handle) { return NULL; }

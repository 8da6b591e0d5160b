/*
 * LD_PRELOAD for memfabric_hybrid, which refuses to start without a driver:
 * realpath("/usr/local/Ascend/driver/version.info") answers $CANN_EMU_VERSION_INFO.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define ASKED "/usr/local/Ascend/driver/version.info"

char *realpath(const char *restrict path, char *restrict out) {
    static char *(*real)(const char *, char *);
    if (!real)
        real = (char *(*)(const char *, char *))dlvsym(RTLD_NEXT, "realpath", "GLIBC_2.3");
    if (!real)
        real = (char *(*)(const char *, char *))dlsym(RTLD_NEXT, "realpath");
    const char *version = getenv("CANN_EMU_VERSION_INFO");
    return real(version && path && !strcmp(path, ASKED) ? version : path, out);
}

char *__realpath_chk(const char *path, char *out, size_t size) {
    (void)size;
    return realpath(path, out);
}

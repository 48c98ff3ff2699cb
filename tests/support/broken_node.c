/* A host on which something is broken: loaded by LD_PRELOAD, told by BROKEN="NODE@WHAT NODE@WHAT".
   NODE is the name in Slurm, or `here` outside of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int broken(const char *what) {
    const char *told = getenv("BROKEN"), *node = getenv("SLURMD_NODENAME");
    char wanted[256];
    snprintf(wanted, sizeof wanted, "%s@%s", node ? node : "here", what);
    return told && strstr(told, wanted) != NULL;
}

#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

int link(const char *from, const char *to) {
    REAL(link);
    if (!broken("link")) return real(from, to);
    errno = EPERM;
    return -1;
}

int rename(const char *from, const char *to) {
    REAL(rename);
    struct stat found;
    if (broken("rename") && stat(to, &found) == 0 && S_ISDIR(found.st_mode)) return 0;
    return real(from, to);
}

#define OPEN(name)                                                   \
    int name(const char *path, int flags, ...) {                     \
        REAL(name);                                                  \
        va_list rest;                                                \
        va_start(rest, flags);                                       \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;    \
        va_end(rest);                                                \
        return real(path, broken("excl") ? flags & ~O_EXCL : flags, mode); \
    }
OPEN(open)
OPEN(open64)

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME && broken("clock")) now->tv_sec += 60;
    return code;
}

__attribute__((constructor)) static void die(void) {
    if (!broken("die")) return;
    fputs("cannot start on this node\n", stderr);
    _exit(7);
}

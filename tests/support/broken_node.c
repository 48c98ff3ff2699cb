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
#include <sys/mman.h>
#include <sys/socket.h>
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
    if (broken("replace")) return errno = ESTALE, -1;
    if (broken("rename") && stat(to, &found) == 0 && S_ISDIR(found.st_mode)) return 0;
    return real(from, to);
}

/* A file of which only the first half has come from another host. */
static int half_of(int whole) {
    char data[4096];
    ssize_t size = pread(whole, data, sizeof data, 0);
    int half = memfd_create("half", 0);
    if (size < 0 || pwrite(half, data, size / 2, 0) < 0) abort();
    close(whole);
    return half;
}

#define OPEN(name)                                                                \
    int name(const char *path, int flags, ...) {                                  \
        REAL(name);                                                               \
        va_list rest;                                                             \
        va_start(rest, flags);                                                    \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                 \
        va_end(rest);                                                             \
        int file = real(path, broken("excl") ? flags & ~O_EXCL : flags, mode);    \
        int halved = file >= 0 && strstr(path, "/value.json") && broken("half");  \
        return halved ? half_of(file) : file;                                     \
    }
OPEN(open)
OPEN(open64)

/* Of files alone: rows go out through a pipe. */
ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    struct stat found;
    int is_file = fstat(file, &found) == 0 && S_ISREG(found.st_mode);
    if (is_file && broken("write")) return errno = EIO, -1;
    if (is_file && broken("slow")) usleep(size / 50); /* 50 MB/s */
    return real(file, data, size);
}

int fsync(int file) {
    REAL(fsync);
    if (broken("fsync")) return errno = EIO, -1;
    if (broken("slow")) usleep(60000);
    return real(file);
}

/* A network that changes a bit of what is longer than a message. */
ssize_t recv(int socket, void *data, size_t size, int flags) {
    REAL(recv);
    ssize_t got = real(socket, data, size, flags);
    if (got > 4096 && broken("sum")) ((char *)data)[got - 1] ^= 1;
    return got;
}

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

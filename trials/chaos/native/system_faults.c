/* Preloaded into a server: its wall clock jumps, and what it writes reaches the disk late or not at all.

   The file that LLMBACKEND_SYSTEM_FAULTS names holds two int64: seconds by which the wall clock is wrong, and what a
   sync does (0 = as ever, 1 = it fails with EIO, more = microseconds that it takes). Every process maps it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t no_faults[2];
static const volatile int64_t *faults = no_faults;

__attribute__((constructor)) static void map_faults(void) {
    const char *path = getenv("LLMBACKEND_SYSTEM_FAULTS");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof no_faults, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) faults = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += faults[0];
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec found;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}

static int synced(const char *name, int file) {
    if (faults[1] == 1) {
        errno = EIO;
        return -1;
    }
    if (faults[1] > 1) usleep(faults[1]);
    int (*real)(int) = dlsym(RTLD_NEXT, name);
    return real(file);
}

int fsync(int file) { return synced("fsync", file); }

int fdatasync(int file) { return synced("fdatasync", file); }

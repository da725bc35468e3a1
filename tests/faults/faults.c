/* Loaded by LD_PRELOAD: counts the calls that change files below a folder, and lets one of them kill the process or fail. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, KILL, KILL_HALFWAY, FAIL, FAIL_FROM_HERE_ON };

static char root[PATH_MAX];
static long fault_at = -1, count;
static int action, error_number;
static char kinds[1 << 16]; /* one letter per event */

/* `error` is for FAIL (this event) and FAIL_FROM_HERE_ON (this and all later events that need space). */
void faults_start(const char *folder, long at, int what, int error) {
    strncpy(root, folder, sizeof root - 1);
    fault_at = at, action = what, error_number = error, count = 0;
}

const char *faults_kinds(void) { return kinds; }

static int below(int folder, const char *path) {
    char place[PATH_MAX] = "", link[64];
    if (!root[0]) return 0;
    if (!path || path[0] != '/') {
        if (folder == AT_FDCWD) return 0; /* the commands get absolute paths */
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, place, sizeof place - 1);
        if (size < 0) return 0;
        path = place;
    }
    return !strncmp(path, root, strlen(root));
}

/* Returns whether the call must fail; `kind` is w for writes, which can also be done by half. */
static int event(char kind) {
    long number = count++;
    if (number < (long)sizeof kinds - 1) kinds[number] = kind, kinds[number + 1] = 0;
    if (fault_at < 0 || number < fault_at) return 0;
    if (number == fault_at && (action == KILL || (action == KILL_HALFWAY && kind != 'w'))) kill(getpid(), SIGKILL);
    if ((number == fault_at && action == FAIL) ||
        (action == FAIL_FROM_HERE_ON && strchr("owms", kind))) {
        errno = error_number;
        return 1;
    }
    return 0;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define OPEN(name)                                                                          \
    int name(const char *path, int flags, ...) {                                           \
        REAL(name);                                                                         \
        va_list list;                                                                       \
        va_start(list, flags);                                                              \
        mode_t mode = va_arg(list, mode_t);                                                 \
        va_end(list);                                                                       \
        if ((flags & (O_CREAT | O_TRUNC)) && below(AT_FDCWD, path) && event('o')) return -1; \
        return real(path, flags, mode);                                                     \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                      \
    int name(int folder, const char *path, int flags, ...) {                             \
        REAL(name);                                                                       \
        va_list list;                                                                     \
        va_start(list, flags);                                                            \
        mode_t mode = va_arg(list, mode_t);                                               \
        va_end(list);                                                                     \
        if ((flags & (O_CREAT | O_TRUNC)) && below(folder, path) && event('o')) return -1; \
        return real(folder, path, flags, mode);                                           \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    if (!below(file, NULL)) return real(file, data, size);
    int last = count == fault_at;
    if (event('w')) return -1;
    if (last && action == KILL_HALFWAY) {
        real(file, data, size / 2);
        kill(getpid(), SIGKILL);
    }
    return real(file, data, size);
}

ssize_t writev(int file, const struct iovec *parts, int number) {
    REAL(writev);
    return below(file, NULL) && event('w') ? -1 : real(file, parts, number);
}

#define ON_FILE(name, kind) \
    int name(int file) { REAL(name); return below(file, NULL) && event(kind) ? -1 : real(file); }
ON_FILE(fsync, 's')
ON_FILE(fdatasync, 's')

#define ON_PATH(name, kind) \
    int name(const char *path) { REAL(name); return below(AT_FDCWD, path) && event(kind) ? -1 : real(path); }
ON_PATH(unlink, 'u')
ON_PATH(rmdir, 'd')
ON_PATH(remove, 'u')

int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    return below(folder, path) && event(flags & AT_REMOVEDIR ? 'd' : 'u') ? -1 : real(folder, path, flags);
}

/* Nothing changes where the folder exists. */
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return below(AT_FDCWD, path) && access(path, F_OK) && event('m') ? -1 : real(path, mode);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    return below(AT_FDCWD, to) && event('r') ? -1 : real(from, to);
}

int renameat(int from_folder, const char *from, int folder, const char *to) {
    REAL(renameat);
    return below(folder, to) && event('r') ? -1 : real(from_folder, from, folder, to);
}

#define TRUNCATE(name) \
    int name(int file, off_t size) { REAL(name); return below(file, NULL) && event('t') ? -1 : real(file, size); }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

/* Clocks that a test can shift. A test preloads this library into its server.
   The file that CLOCK_SHIFT names holds two longs, in seconds. The first is added to the wall clock (CLOCK_REALTIME), the
   second to CLOCK_BOOTTIME, which also counts while the machine is suspended. CLOCK_MONOTONIC is not changed. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(int which) {
  static volatile long *at;
  if (at == NULL) {
    int fd = open(getenv("CLOCK_SHIFT"), O_RDONLY);
    at = mmap(NULL, 2 * sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
  }
  return at[which];
}

int clock_gettime(clockid_t id, struct timespec *now) {
  int failed = (int)syscall(SYS_clock_gettime, id, now);
  if (failed == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += shift(0);
  if (failed == 0 && id == CLOCK_BOOTTIME) now->tv_sec += shift(1);
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  int failed = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *at) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (at != NULL) *at = exact.tv_sec;
  return exact.tv_sec;
}

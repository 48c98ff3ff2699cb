/* Fake hardware: two GPUs behind NVML's interface (names, order and units as in its API Reference).
   GPU 1 has no energy counter and no power figure: NVML_ERROR_NOT_SUPPORTED is 3. FAKE_NVML_ENERGY
   names a file with GPU 0's millijoules. Built by tests/runtime/hardware/test_hardware.py. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
static int gpus[2] = {0, 1};

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned n, void **out) {
  if (n > 1) return 2;
  *out = &gpus[n];
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
  if (strcmp(uuid, "GPU-b")) return 6;
  *out = &gpus[1];
  return 0;
}
int nvmlDeviceGetName(void *gpu, char *out, unsigned length) {
  snprintf(out, length, "NVIDIA H100 %d", *(int *)gpu);
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *gpu, utilization *out) { out->gpu = 73; return 0; }
int nvmlDeviceGetMemoryInfo(void *gpu, memory *out) {
  out->total = 80ULL << 30;
  out->free = 60ULL << 30;
  out->used = 20ULL << 30;
  return 0;
}
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *out) {
  *out = 512500;
  return *(int *)gpu ? 3 : 0;
}
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *out) {
  *out = 61;
  return sensor;
}
int nvmlDeviceGetClockInfo(void *gpu, int clock, unsigned *out) {
  *out = clock == 1 ? 1980 : clock == 2 ? 2619 : 0;
  return 0;
}
int nvmlDeviceGetTotalEccErrors(void *gpu, int type, int counter, unsigned long long *out) {
  *out = type == 1 ? 0 : 4;
  return counter;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *out) {
  *out = *(int *)gpu ? 0x1 : 0x4 | 0x20; /* idle; power cap and heat */
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *gpu, unsigned long long *out) {
  FILE *file = fopen(getenv("FAKE_NVML_ENERGY"), "r");
  if (*(int *)gpu || !file) return 3;
  int read = fscanf(file, "%llu", out);
  fclose(file);
  return read == 1 ? 0 : 3;
}

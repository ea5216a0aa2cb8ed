/* libcuda.so without a GPU: what a launch hands to the driver is written to a file instead. */
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static FILE *out;
static int num_params, sizes[512];

/* From now on launches are of a kernel with parameters of these sizes. */
void stub_expect(const char *path, int count, const int *bytes) {
    out = fopen(path, "w");
    num_params = count;
    memcpy(sizes, bytes, count * sizeof(int));
}

void stub_close(void) { fclose(out); }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
    fprintf(out, "grid %u %u %u threads %u shared %u stream %p function %p attributes %u\n", config->gridDimX,
            config->gridDimY, config->gridDimZ, config->blockDimX, config->sharedMemBytes, (void *)config->hStream,
            (void *)function, config->numAttrs);
    for (int i = 0; i < num_params; i++) {
        fprintf(out, "%d: ", i);
        for (int j = 0; j < sizes[i]; j++) fprintf(out, "%02x", ((unsigned char *)params[i])[j]);
        fprintf(out, "\n");
    }
    return CUDA_SUCCESS;
}

static uint64_t mix(uint64_t hash, const void *data, size_t bytes) {
    for (const unsigned char *p = data; bytes--; p++) hash = (hash ^ *p) * 1099511628211ull;
    return hash;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    int rest[] = {type, rank, interleave, swizzle, promotion, fill};
    uint64_t hash = mix(mix(14695981039346656037ull, rest, sizeof rest), &address, sizeof address);
    hash = mix(mix(hash, dims, 8 * rank), strides, 8 * (rank - 1));
    hash = mix(mix(hash, box, 4 * rank), steps, 4 * rank);
    memset(map, 0, sizeof *map);
    memcpy(map, &hash, sizeof hash);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    static uintptr_t loaded;
    *module = (CUmodule)(++loaded);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)module;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr *)data = pointer;
    return CUDA_SUCCESS;
}

#undef cuDevicePrimaryCtxRetain
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "stub"; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) { *value = 232448; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) { *value = 1024; return 0; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) { *count = 1; return 0; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

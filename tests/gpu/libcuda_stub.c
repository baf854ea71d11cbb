// The CUDA driver calls that CaraServe makes, for tests without a device: executed at once on host memory. The compiler
// checks these prototypes against the real ones.
//
// It rejects what a driver would: handles and addresses that it did not return, threads without a context, streams in a
// capture where none is allowed. Device addresses differ from host addresses, so mixing them up is an error.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 4096, KINDS = 6 };
enum Kind { CONTEXT = 1, STREAM, EVENT, GRAPH, EXEC };
typedef struct { CUdeviceptr device; char* host; size_t size; int registered; } Range;
typedef struct { int what; CUdeviceptr to, from; size_t to_pitch, from_pitch, width, rows; uint32_t value; } Work;
typedef struct { Work work[256]; int length; } Recording;

static struct {
    char log[1 << 16], failing[64];
    int kept_gil; // in the last call
    int logged, status, initialized, handles[KINDS], busy, attributes[256], unmet, ranges_used;
    long long chunk_gap; // bytes by which mapped chunks from the second on are displaced
    Range ranges[MOST];
    Recording graphs[64], *capturing[64];
} driver;
static _Thread_local int has_context;

// --- controls for tests ---

void stub_reset(void) {
    memset(&driver, 0, sizeof driver);
    driver.attributes[CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT] = 132;
    driver.attributes[CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE] = 60 << 20;
    driver.attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = 9;
    driver.attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR] = 0;
    driver.attributes[CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM] = 1;
    driver.attributes[CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS] = 1;
    has_context = 0;
}
__attribute__((constructor)) static void begin(void) { stub_reset(); }
const char* stub_log(void) { return driver.log; }
void stub_attribute(int attribute, int value) { driver.attributes[attribute] = value; }
void stub_busy(int busy) { driver.busy = busy; } // 1: events are pending
size_t stub_launch_config_bytes(void) { return sizeof(CUlaunchConfig); }
size_t stub_launch_attribute_bytes(void) { return sizeof(CUlaunchAttribute); }
void stub_chunk_gap(long long gap) { driver.chunk_gap = gap; }
int stub_kept_gil(void) { return driver.kept_gil; }
int stub_unmet(void) { return driver.unmet; } // waits that would have blocked
void stub_fail(const char* name, int status) { // the next call
    snprintf(driver.failing, sizeof driver.failing, "%s", name);
    driver.status = status;
}

// --- handles, addresses, work ---

static CUresult called(const char* name, const char* format, ...) {
    int (*const holds_gil)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    driver.kept_gil = holds_gil();
    va_list arguments;
    va_start(arguments, format);
    driver.logged += snprintf(driver.log + driver.logged, sizeof driver.log - driver.logged, "%s", name);
    driver.logged += vsnprintf(driver.log + driver.logged, sizeof driver.log - driver.logged, format, arguments);
    driver.logged += snprintf(driver.log + driver.logged, sizeof driver.log - driver.logged, "\n");
    va_end(arguments);
    const int fails = strcmp(name, driver.failing) == 0;
    if (fails) driver.failing[0] = 0;
    if (fails) return (CUresult)driver.status;
    if (!driver.initialized && strcmp(name, "cuInit") != 0) return CUDA_ERROR_NOT_INITIALIZED;
    return CUDA_SUCCESS;
}
#define CALLED(...)                                                       \
    do {                                                                  \
        const CUresult status = called(__func__, __VA_ARGS__);            \
        if (status != CUDA_SUCCESS) return status;                        \
    } while (0)
#define IN_CONTEXT(...)                                                   \
    do {                                                                  \
        CALLED(__VA_ARGS__);                                              \
        if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;              \
    } while (0)
#define NEEDS(condition, error) \
    if (!(condition)) return error

static void* handle(enum Kind kind) { // wider than 32 bits
    return (void*)(((uintptr_t)kind << 40) + (uintptr_t)++driver.handles[kind]);
}
static int index_of(const void* handle, enum Kind kind) { // 0: not a handle of this stub
    const uintptr_t value = (uintptr_t)handle;
    const int index = (int)(value & 0xffffffff);
    return value >> 40 == (uintptr_t)kind && index <= driver.handles[kind] ? index : 0;
}

static CUresult check(const void* handle, enum Kind kind) {
    return index_of(handle, kind) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUdeviceptr map(void* host, size_t size, CUdeviceptr device, int registered) {
    driver.ranges[driver.ranges_used++] = (Range){device, host, size, registered};
    return device;
}
static char* host_of(CUdeviceptr address, size_t size) {
    for (int i = 0; i < driver.ranges_used; i++) {
        const Range* range = &driver.ranges[i];
        if (range->size && address >= range->device && address + size <= range->device + range->size)
            return range->host + (address - range->device);
    }
    return NULL;
}

enum { COPY, FILL, SET, WAIT };
static CUresult perform(const Work* work) {
    for (size_t row = 0; row < work->rows; row++) {
        char* to = host_of(work->to + row * work->to_pitch, work->width);
        const char* from = work->what == COPY ? host_of(work->from + row * work->from_pitch, work->width) : to;
        NEEDS(to && from, CUDA_ERROR_INVALID_VALUE);
        if (work->what == COPY) memcpy(to, from, work->width);
        if (work->what == FILL) memset(to, (int)work->value, work->width);
        if (work->what == SET) memcpy(to, &work->value, work->width);
        if (work->what == WAIT) {
            uint32_t word;
            memcpy(&word, to, sizeof word);
            driver.unmet += (int32_t)(word - work->value) < 0;
        }
    }
    return CUDA_SUCCESS;
}
static CUresult issue(CUstream stream, Work work) {
    const int index = index_of(stream, STREAM);
    NEEDS(index, CUDA_ERROR_INVALID_HANDLE);
    if (!driver.capturing[index]) return perform(&work);
    driver.capturing[index]->work[driver.capturing[index]->length++] = work;
    return CUDA_SUCCESS;
}

// --- the device ---

CUresult cuInit(unsigned int Flags) {
    CALLED(" %u", Flags);
    NEEDS(Flags == 0, CUDA_ERROR_INVALID_VALUE);
    driver.initialized = 1;
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* driverVersion) {
    *driverVersion = 13020;
    return called(__func__, "");
}
CUresult cuDeviceGetCount(int* count) {
    *count = 1;
    return called(__func__, "");
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    CALLED(" %d", ordinal);
    NEEDS(ordinal == 0, CUDA_ERROR_INVALID_DEVICE);
    *device = 7;
    return CUDA_SUCCESS;
}
static CUresult say(char* to, int length, const char* text, CUdevice device) {
    NEEDS(device == 7, CUDA_ERROR_INVALID_DEVICE);
    NEEDS(length > (int)strlen(text), CUDA_ERROR_INVALID_VALUE);
    strcpy(to, text);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int len, CUdevice dev) {
    CALLED("");
    return say(name, len, "NVIDIA H200", dev);
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice dev) {
    CALLED("");
    NEEDS(dev == 7, CUDA_ERROR_INVALID_DEVICE);
    *bytes = 139ull << 30;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char* pciBusId, int len, CUdevice dev) {
    CALLED("");
    return say(pciBusId, len, "0000:C1:00.0", dev);
}
CUresult cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev) {
    CALLED(" %d", (int)attrib);
    NEEDS(dev == 7, CUDA_ERROR_INVALID_DEVICE);
    *pi = driver.attributes[attrib];
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev) {
    CALLED(" %d", dev);
    NEEDS(dev == 7, CUDA_ERROR_INVALID_DEVICE);
    *pctx = handle(CONTEXT);
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext ctx) {
    CALLED("");
    NEEDS(index_of(ctx, CONTEXT), CUDA_ERROR_INVALID_CONTEXT);
    has_context = 1;
    return CUDA_SUCCESS;
}

// --- memory ---

#define ALLOCATED 0xd00000000000ull // offset from host to device addresses
#define REGISTERED 0x100000000000ull

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    IN_CONTEXT("");
    *free = 130ull << 30;
    *total = 139ull << 30;
    return CUDA_SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr* dptr, size_t bytesize) {
    IN_CONTEXT(" %zu", bytesize);
    char* host = malloc(bytesize);
    memset(host, 0xDD, bytesize < 4096 ? bytesize : 4096);
    *dptr = map(host, bytesize, ALLOCATED + (CUdeviceptr)(uintptr_t)host, 0);
    return CUDA_SUCCESS;
}
CUresult cuMemHostRegister_v2(void* p, size_t bytesize, unsigned int Flags) {
    IN_CONTEXT(" %zu %u", bytesize, Flags);
    int before = 0;
    for (int i = 0; i < driver.ranges_used; i++) before += driver.ranges[i].registered && driver.ranges[i].size;
    const long long gap = before ? driver.chunk_gap : 0;
    map(p, bytesize, REGISTERED + (CUdeviceptr)(uintptr_t)p + gap, 1);
    return CUDA_SUCCESS;
}
static Range* registered(const void* p) {
    for (Range* range = driver.ranges; range < driver.ranges + driver.ranges_used; range++)
        if (range->host == p && range->registered && range->size) return range;
    return NULL;
}
CUresult cuMemHostUnregister(void* p) {
    IN_CONTEXT("");
    Range* range = registered(p);
    NEEDS(range, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    range->size = 0;
    return CUDA_SUCCESS;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* pdptr, void* p, unsigned int Flags) {
    IN_CONTEXT(" %u", Flags);
    const Range* range = registered(p);
    NEEDS(range && Flags == 0, CUDA_ERROR_INVALID_VALUE);
    *pdptr = range->device;
    return CUDA_SUCCESS;
}
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream) {
    IN_CONTEXT(" %zu", ByteCount);
    return issue(hStream, (Work){COPY, dst, src, 0, 0, ByteCount, 1, 0});
}
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* pCopy, CUstream hStream) {
    IN_CONTEXT(" %zu %zu", pCopy->WidthInBytes, pCopy->Height);
    NEEDS(pCopy->srcMemoryType == CU_MEMORYTYPE_UNIFIED, CUDA_ERROR_INVALID_VALUE);
    NEEDS(pCopy->dstMemoryType == CU_MEMORYTYPE_UNIFIED, CUDA_ERROR_INVALID_VALUE);
    NEEDS(!(pCopy->srcXInBytes | pCopy->srcY | pCopy->dstXInBytes | pCopy->dstY), CUDA_ERROR_INVALID_VALUE);
    NEEDS(pCopy->srcPitch >= pCopy->WidthInBytes && pCopy->dstPitch >= pCopy->WidthInBytes, CUDA_ERROR_INVALID_VALUE);
    return issue(hStream, (Work){COPY, pCopy->dstDevice, pCopy->srcDevice, pCopy->dstPitch, pCopy->srcPitch,
                                 pCopy->WidthInBytes, pCopy->Height, 0});
}
CUresult cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream) {
    IN_CONTEXT(" %u %zu", uc, N);
    return issue(hStream, (Work){FILL, dstDevice, 0, 0, 0, N, 1, uc});
}
CUresult cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream) {
    IN_CONTEXT(" %u %zu", ui, N);
    return issue(hStream, (Work){SET, dstDevice, 0, 4, 0, 4, N, ui});
}

// --- streams, events, graphs ---

CUresult cuStreamCreateWithPriority(CUstream* phStream, unsigned int flags, int priority) {
    IN_CONTEXT(" %u %d", flags, priority);
    *phStream = handle(STREAM);
    return CUDA_SUCCESS;
}
CUresult cuStreamDestroy_v2(CUstream hStream) {
    IN_CONTEXT("");
    return index_of(hStream, STREAM) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags) {
    IN_CONTEXT(" %u", Flags);
    NEEDS(Flags == 0, CUDA_ERROR_INVALID_VALUE);
    return index_of(hStream, STREAM) && index_of(hEvent, EVENT) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
static CUresult word(CUstream stream, int what, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    NEEDS(driver.attributes[CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS], CUDA_ERROR_NOT_SUPPORTED);
    NEEDS(flags == 0 && address % 4 == 0, CUDA_ERROR_INVALID_VALUE);
    return issue(stream, (Work){what, address, 0, 0, 0, 4, 1, value});
}
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags) {
    IN_CONTEXT(" %u %u", value, flags);
    return word(stream, WAIT, addr, value, flags);
}
CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags) {
    IN_CONTEXT(" %u %u", value, flags);
    return word(stream, SET, addr, value, flags);
}
CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* paramArray,
                               unsigned int flags) {
    IN_CONTEXT(" %u %u", count, flags);
    NEEDS(count > 0 && count < 256 && flags == 0, CUDA_ERROR_INVALID_VALUE);
    for (unsigned i = 0; i < count; i++) {
        const CUstreamBatchMemOpParams* each = &paramArray[i];
        const int waits = each->operation == CU_STREAM_MEM_OP_WAIT_VALUE_32;
        NEEDS(waits || each->operation == CU_STREAM_MEM_OP_WRITE_VALUE_32, CUDA_ERROR_INVALID_VALUE);
        const CUresult status = waits
            ? word(stream, WAIT, each->waitValue.address, each->waitValue.value, each->waitValue.flags)
            : word(stream, SET, each->writeValue.address, each->writeValue.value, each->writeValue.flags);
        NEEDS(status == CUDA_SUCCESS, status);
    }
    return CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode) {
    IN_CONTEXT(" %d", (int)mode);
    const int index = index_of(hStream, STREAM);
    NEEDS(index, CUDA_ERROR_INVALID_HANDLE);
    NEEDS(mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && !driver.capturing[index], CUDA_ERROR_INVALID_VALUE);
    driver.capturing[index] = &driver.graphs[driver.handles[GRAPH] + 1];
    return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream hStream, CUgraph* phGraph) {
    IN_CONTEXT("");
    const int index = index_of(hStream, STREAM);
    NEEDS(index, CUDA_ERROR_INVALID_HANDLE);
    NEEDS(driver.capturing[index], CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    driver.capturing[index] = NULL;
    *phGraph = handle(GRAPH);
    return CUDA_SUCCESS;
}
// A function's handle is the number of its arguments. They follow in the log, each read as 8 bytes.
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** kernelParams, void** extra) {
    IN_CONTEXT(" %u %u %u %u %u %u %u %u", config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
               config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->numAttrs);
    NEEDS(index_of(config->hStream, STREAM), CUDA_ERROR_INVALID_HANDLE);
    NEEDS(extra == NULL, CUDA_ERROR_INVALID_VALUE);
    for (unsigned i = 0; i < config->numAttrs; i++)
        called("attribute", " %d %d", (int)config->attrs[i].id,
               config->attrs[i].value.programmaticStreamSerializationAllowed);
    for (uintptr_t i = 0; i < (uintptr_t)f; i++) called("argument", " %llu", *(unsigned long long*)kernelParams[i]);
    return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent* phEvent, unsigned int Flags) {
    IN_CONTEXT(" %u", Flags);
    *phEvent = handle(EVENT);
    return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent hEvent, CUstream hStream) {
    IN_CONTEXT("");
    return index_of(hEvent, EVENT) && index_of(hStream, STREAM) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuEventQuery(CUevent hEvent) {
    IN_CONTEXT("");
    NEEDS(index_of(hEvent, EVENT), CUDA_ERROR_INVALID_HANDLE);
    return driver.busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent hEvent) {
    IN_CONTEXT("");
    return check(hEvent, EVENT);
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* phGraphExec, CUgraph hGraph, unsigned long long flags) {
    IN_CONTEXT(" %llu", flags);
    const int index = index_of(hGraph, GRAPH);
    NEEDS(index, CUDA_ERROR_INVALID_HANDLE);
    *phGraphExec = (CUgraphExec)(((uintptr_t)EXEC << 40) + (uintptr_t)index);
    driver.handles[EXEC] = index;
    return CUDA_SUCCESS;
}
CUresult cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream) {
    IN_CONTEXT("");
    return index_of(hGraphExec, EXEC) && index_of(hStream, STREAM) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream) {
    IN_CONTEXT("");
    const int index = index_of(hGraphExec, EXEC);
    NEEDS(index, CUDA_ERROR_INVALID_HANDLE);
    CUresult status = CUDA_SUCCESS;
    for (int i = 0; i < driver.graphs[index].length && status == CUDA_SUCCESS; i++)
        status = issue(hStream, driver.graphs[index].work[i]);
    return status;
}
CUresult cuGraphExecDestroy(CUgraphExec hGraphExec) {
    IN_CONTEXT("");
    return check(hGraphExec, EXEC);
}
CUresult cuGraphDestroy(CUgraph hGraph) {
    IN_CONTEXT("");
    return check(hGraph, GRAPH);
}

// --- names of errors ---

static CUresult tell(CUresult error, const char** text, const char* of_memory) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? of_memory : error < 900 ? "other" : NULL;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGetErrorName(CUresult error, const char** pStr) { return tell(error, pStr, "CUDA_ERROR_OUT_OF_MEMORY"); }
CUresult cuGetErrorString(CUresult error, const char** pStr) { return tell(error, pStr, "out of memory"); }

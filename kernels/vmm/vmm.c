/* Device memory that can go away and come back at the same address.
 *
 * Loaded with RTLD_GLOBAL before torch, so that torch's caching allocator gets its segments from the cudaMalloc
 * below: reserved addresses with physical memory mapped behind them (CUDA driver API, "Virtual Memory
 * Management"). When a suspend has copied the blocks, they are unmapped and released; the addresses stay reserved.
 * A resume has new memory created and mapped at the same addresses, and then filled.
 *
 * The declarations of the driver's types are our own, so that CUDA's headers are not needed; a test
 * compares them with cuda.h where that exists. Driver and runtime are found at run time, when they are needed.
 * Error codes of the driver up to 999 mean the same to the runtime, so they are passed on as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_SYMBOL = 500, MAX_DEVICES = 64 };
enum { PEER_ALREADY_ENABLED = 704 };
enum { ATTRIBUTE_VMM = 102, TYPE_PINNED = 1, LOCATION_DEVICE = 1, ACCESS_READ_WRITE = 3 };

/* Smaller requests do not come from torch, whose smallest segment is 2 MiB, and would waste a whole granule each. */
static const size_t SMALLEST = 1 << 20;

struct location { int type, id; };
struct properties {
    int type, handle_types;
    struct location location;
    void *win32;
    unsigned char compression, gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
struct access { struct location location; int flags; };

static struct {
    int (*address_reserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
    int (*address_free)(uint64_t, size_t);
    int (*create)(uint64_t *, size_t, const struct properties *, unsigned long long);
    int (*release)(uint64_t);
    int (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
    int (*unmap)(uint64_t, size_t);
    int (*set_access)(uint64_t, size_t, const struct access *, size_t);
    int (*granularity)(size_t *, const struct properties *, int);
    int (*attribute)(int *, int, int);
    int (*ctx_current)(void **);
    int (*ctx_device)(int *);
    int (*ctx_push)(void *);
    int (*ctx_pop)(void **);
    int (*ctx_synchronize)(void);
} driver;

static const struct { const char *name; void **slot; } SYMBOLS[] = {
    {"cuMemAddressReserve", (void **)&driver.address_reserve},
    {"cuMemAddressFree", (void **)&driver.address_free},
    {"cuMemCreate", (void **)&driver.create},
    {"cuMemRelease", (void **)&driver.release},
    {"cuMemMap", (void **)&driver.map},
    {"cuMemUnmap", (void **)&driver.unmap},
    {"cuMemSetAccess", (void **)&driver.set_access},
    {"cuMemGetAllocationGranularity", (void **)&driver.granularity},
    {"cuDeviceGetAttribute", (void **)&driver.attribute},
    {"cuCtxGetCurrent", (void **)&driver.ctx_current},
    {"cuCtxGetDevice", (void **)&driver.ctx_device},
    {"cuCtxPushCurrent_v2", (void **)&driver.ctx_push},
    {"cuCtxPopCurrent_v2", (void **)&driver.ctx_pop},
    {"cuCtxSynchronize", (void **)&driver.ctx_synchronize},
};

static struct {
    int (*malloc)(void **, size_t);
    int (*free)(void *);
    int (*device)(int *);
    int (*enable_peer)(int, unsigned);
} runtime;

/* What Python sees of a block; `kernels/vmm/shim.py` has the same structure. */
struct block_info { uint64_t address, nbytes; int32_t device, mapped; };

struct block {
    struct block_info info;
    size_t mapped_bytes; /* nbytes, rounded up to the device's granularity */
    uint64_t handle;
    void *context;
    int fresh; /* created by the reservation that is going on */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;
static size_t count, capacity;
/* Whether a device may use the memory of another one: [who][whose]. */
static unsigned char peers[MAX_DEVICES][MAX_DEVICES];
static _Thread_local char message[256];

static int failed(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return code;
}

/* Calls the driver. If that fails, records the call and returns its code from the enclosing function. */
#define TRY(call)                                                                                                  \
    do {                                                                                                           \
        int code_ = (call);                                                                                        \
        if (code_ != SUCCESS)                                                                                      \
            return failed(code_, "%.*s: CUDA error %d", (int)strcspn(#call, "("), #call, code_);                   \
    } while (0)

/* Only copies the path: the linker's lock is held here, so no library may be opened. */
static int find_runtime(struct dl_phdr_info *object, size_t size, void *path) {
    (void)size;
    const char *slash = strrchr(object->dlpi_name, '/');
    if (strncmp(slash ? slash + 1 : object->dlpi_name, "libcudart", 9) != 0) return 0;
    snprintf(path, PATH_MAX, "%s", object->dlpi_name);
    return 1;
}

/* Finds the loaded runtime. Our own cudaMalloc hides its symbol, so the symbol is looked up in the library. */
static int need_runtime(void) {
    if (runtime.malloc) return SUCCESS;
    char path[PATH_MAX];
    void *library = dl_iterate_phdr(find_runtime, path) ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (!library) return failed(NOT_INITIALIZED, "no libcudart is loaded");
    runtime.free = (int (*)(void *))dlsym(library, "cudaFree");
    runtime.device = (int (*)(int *))dlsym(library, "cudaGetDevice");
    runtime.enable_peer = (int (*)(int, unsigned))dlsym(library, "cudaDeviceEnablePeerAccess");
    int (*allocate)(void **, size_t) = (int (*)(void **, size_t))dlsym(library, "cudaMalloc");
    if (!allocate || !runtime.free || !runtime.device) return failed(NO_SYMBOL, "libcudart lacks cudaMalloc");
    runtime.malloc = allocate;
    return SUCCESS;
}

static int need_driver(void) {
    static int ready;
    if (ready) return SUCCESS;
    void *library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!library) return failed(NOT_INITIALIZED, "no libcuda.so.1");
    for (size_t i = 0; i < sizeof SYMBOLS / sizeof *SYMBOLS; i++)
        if (!(*SYMBOLS[i].slot = dlsym(library, SYMBOLS[i].name)))
            return failed(NO_SYMBOL, "the driver lacks %s", SYMBOLS[i].name);
    ready = 1;
    return SUCCESS;
}

/* Makes the context of the runtime's present device current, as the runtime's own cudaMalloc would. */
static int current(void **context, int *device) {
    int wanted;
    TRY(runtime.device(&wanted));
    TRY(driver.ctx_current(context));
    if (*context) TRY(driver.ctx_device(device));
    if (!*context || *device != wanted) {
        TRY(runtime.free(NULL));
        TRY(driver.ctx_current(context));
        TRY(driver.ctx_device(device));
    }
    return *device >= 0 && *device < MAX_DEVICES ? SUCCESS : failed(NOT_INITIALIZED, "no CUDA device");
}

static struct properties properties_on(int device) {
    struct properties properties;
    memset(&properties, 0, sizeof properties);
    properties.type = TYPE_PINNED;
    properties.location = (struct location){LOCATION_DEVICE, device};
    return properties;
}

/* Gives the block's device, and enabled peers, access. CUDA itself does so for cudaMalloc's memory only. */
static int set_access(struct block *block) {
    struct access access[MAX_DEVICES];
    size_t users = 0;
    for (int device = 0; device < MAX_DEVICES; device++)
        if (device == block->info.device || peers[device][block->info.device])
            access[users++] = (struct access){{LOCATION_DEVICE, device}, ACCESS_READ_WRITE};
    return driver.set_access(block->info.address, block->mapped_bytes, access, users);
}

static int map(struct block *block) {
    TRY(driver.map(block->info.address, block->mapped_bytes, 0, block->handle, 0));
    int code = set_access(block);
    if (code != SUCCESS) {
        driver.unmap(block->info.address, block->mapped_bytes);
        return failed(code, "cuMemSetAccess: CUDA error %d", code);
    }
    block->info.mapped = 1;
    return SUCCESS;
}

static int create(struct block *block) {
    struct properties properties = properties_on(block->info.device);
    TRY(driver.create(&block->handle, block->mapped_bytes, &properties, 0));
    return SUCCESS;
}

/* Waits for all kernels of a context, as cudaFree does: they may still use a block. */
static int settle(void *context) {
    void *ignored;
    TRY(driver.ctx_push(context));
    int code = driver.ctx_synchronize();
    driver.ctx_pop(&ignored);
    return code == SUCCESS ? SUCCESS : failed(code, "cuCtxSynchronize: CUDA error %d", code);
}

/* Unmaps a block and releases its memory. If the release fails, the block is unmapped and the memory leaks. */
static int give_up(struct block *block) {
    if (!block->info.mapped) return SUCCESS;
    TRY(driver.unmap(block->info.address, block->mapped_bytes));
    block->info.mapped = 0;
    TRY(driver.release(block->handle));
    return SUCCESS;
}

static int grow(void) {
    if (count < capacity) return SUCCESS;
    size_t wanted = capacity ? 2 * capacity : 64;
    struct block *larger = realloc(blocks, wanted * sizeof *larger);
    if (!larger) return failed(OUT_OF_MEMORY, "no host memory for the table of blocks");
    blocks = larger;
    capacity = wanted;
    return SUCCESS;
}

static int allocate(void **address, size_t nbytes) {
    struct block block = {.info = {.nbytes = nbytes}};
    int able = 0;
    size_t granularity;
    TRY(need_driver());
    TRY(current(&block.context, &block.info.device));
    TRY(driver.attribute(&able, ATTRIBUTE_VMM, block.info.device));
    if (!able) return runtime.malloc(address, nbytes);
    TRY(grow());
    struct properties properties = properties_on(block.info.device);
    TRY(driver.granularity(&granularity, &properties, 0));
    block.mapped_bytes = (nbytes + granularity - 1) / granularity * granularity;
    TRY(create(&block));
    int code = driver.address_reserve(&block.info.address, block.mapped_bytes, 0, 0, 0);
    if (code == SUCCESS) {
        code = map(&block);
        if (code != SUCCESS) driver.address_free(block.info.address, block.mapped_bytes);
    }
    if (code != SUCCESS) {
        driver.release(block.handle);
        return failed(code, "a block of %zu bytes: CUDA error %d", nbytes, code);
    }
    blocks[count++] = block;
    *address = (void *)(uintptr_t)block.info.address;
    return SUCCESS;
}

static int discard(struct block *block) {
    TRY(settle(block->context));
    TRY(give_up(block));
    TRY(driver.address_free(block->info.address, block->mapped_bytes));
    *block = blocks[--count];
    return SUCCESS;
}

static struct block *block_at(uint64_t address) {
    for (size_t i = 0; i < count; i++)
        if (blocks[i].info.address == address) return &blocks[i];
    return NULL;
}

int cudaMalloc(void **address, size_t nbytes) {
    pthread_mutex_lock(&lock);
    int code = need_runtime();
    if (code == SUCCESS && nbytes < SMALLEST) {
        code = runtime.malloc(address, nbytes);
    } else if (code == SUCCESS) {
        code = allocate(address, nbytes);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int cudaFree(void *address) {
    pthread_mutex_lock(&lock);
    struct block *block = block_at((uint64_t)(uintptr_t)address);
    int code;
    if (block) {
        code = discard(block);
    } else {
        code = need_runtime();
        if (code == SUCCESS) code = runtime.free(address);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int enable_peer(int whose, unsigned flags) {
    int who;
    TRY(need_runtime());
    if (!runtime.enable_peer) return failed(NO_SYMBOL, "libcudart lacks cudaDeviceEnablePeerAccess");
    TRY(runtime.device(&who));
    int code = runtime.enable_peer(whose, flags);
    /* A caller that learns that it was enabled before goes on, too. */
    if (code != SUCCESS && code != PEER_ALREADY_ENABLED) return code;
    if (who < 0 || who >= MAX_DEVICES || whose < 0 || whose >= MAX_DEVICES || peers[who][whose]) return code;
    peers[who][whose] = 1;
    for (size_t i = 0; i < count; i++)
        if (blocks[i].info.device == whose && blocks[i].info.mapped) TRY(set_access(&blocks[i]));
    return code;
}

/* Also enables peer access to the blocks: present ones, and those that are mapped later. */
int cudaDeviceEnablePeerAccess(int whose, unsigned flags) {
    pthread_mutex_lock(&lock);
    int code = enable_peer(whose, flags);
    pthread_mutex_unlock(&lock);
    return code;
}

/* Writes at most `room` blocks to `out` and returns how many there are. */
size_t gpuslice_vmm_blocks(struct block_info *out, size_t room) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count && i < room; i++) out[i] = blocks[i].info;
    size_t all = count;
    pthread_mutex_unlock(&lock);
    return all;
}

/* Returns the last failed call of this thread, as text. */
const char *gpuslice_vmm_message(void) { return message; }

/* Gives the physical memory of all blocks of a device back; their addresses stay reserved. */
int gpuslice_vmm_release(int device) {
    int code = SUCCESS;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count && code == SUCCESS; i++) {
        if (blocks[i].info.device != device || !blocks[i].info.mapped) continue;
        if ((code = settle(blocks[i].context)) == SUCCESS) code = give_up(&blocks[i]);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* All physical memory is created before the first page is mapped, so running out of it costs little. */
static int reserve(int device) {
    for (size_t i = 0; i < count; i++) {
        if (blocks[i].info.device != device || blocks[i].info.mapped) continue;
        TRY(create(&blocks[i]));
        blocks[i].fresh = 1;
    }
    for (size_t i = 0; i < count; i++)
        if (blocks[i].fresh) TRY(map(&blocks[i]));
    return SUCCESS;
}

/* Gives all blocks of a device memory again at their addresses; if one cannot have it, none gets it. */
int gpuslice_vmm_reserve(int device) {
    pthread_mutex_lock(&lock);
    int code = reserve(device);
    for (size_t i = 0; i < count; i++) {
        struct block *block = &blocks[i];
        if (code != SUCCESS && block->fresh) {
            if (block->info.mapped) driver.unmap(block->info.address, block->mapped_bytes);
            driver.release(block->handle);
            block->info.mapped = 0;
        }
        block->fresh = 0;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

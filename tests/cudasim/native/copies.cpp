// Copies: what is read early or late, at random, and written late. Pageable memory is staged, as CUDA documents.
#include "sim.h"
#include <cstdio>
#include <cstring>

namespace sim {

struct Side { char* at; bool device, pageable; Block block; };

static int resolve(const void* p, size_t n, Side* side) {
    *side = {(char*)p, is_device(p), false, {}};
    if (side->device) {
        side->at = shadow(p);
        if (find_block(p, n, &side->block)) return OK;
        fprintf(stderr, "cudasim: a copy of %zu bytes at %p, which is no device memory\n", n, p);
        return INVALID_VALUE;
    }
    Host host = host_range(p, n, &side->at);
    side->pageable = host == Host::PAGEABLE;
    if (host != Host::CROSSING) return OK;
    fprintf(stderr, "cudasim: a copy of %zu bytes at %p crosses the end of a page-locked range\n", n, p);
    return INVALID_VALUE;
}

static void count(const Side& to, const Side& from, size_t n) {
    count_bytes(from.device ? (to.device ? "d2d" : "d2h") : (to.device ? "h2d" : "h2h"), n);
}

static void move(Stream& stream, char* to, const char* from, size_t n) {
    if (!settings().asynchronous) {
        memmove(to, from, n);
    } else if (stream.coin()) {  // reads as early as it may
        std::string read(from, n);
        stream.linger();
        memcpy(to, read.data(), n);
    } else {  // reads as late as it may
        stream.linger();
        memmove(to, from, n);
    }
}

/// Memory that was mapped is another device's only by cuMemSetAccess, whatever peers were enabled.
static bool reaches(const Block& block, int device) {
    return !block.mapped_for || (block.mapped_for >> device & 1);
}

int copy(void* to, const void* from, size_t n, Stream& stream, bool asynchronous, bool peers) {
    if (!n) return OK;
    Side target, source;
    if (int code = resolve(to, n, &target)) return code;
    if (int code = resolve(from, n, &source)) return code;
    if (target.device && source.device && target.block.device != source.block.device && !peers &&
        !(reaches(target.block, stream.device) && reaches(source.block, stream.device))) {
        fprintf(stderr, "cudasim: a copy of %zu bytes between devices, of mapped memory that one may not use\n", n);
        return INVALID_VALUE;
    }
    count(target, source, n);
    char *at = target.at, *of = source.at;
    if (stream.capture) {
        record(stream, [=] { memmove(at, of, n); }, {{at, n}}, target.device);
        return OK;
    }
    if (source.pageable && asynchronous && settings().asynchronous) {  // the caller may change it as soon as we return
        auto staged = std::make_shared<std::string>(of, n);
        stream.push([=, &stream] {
            stream.linger();
            memcpy(at, staged->data(), n);
        });
    } else {
        stream.push([=, &stream] { move(stream, at, of, n); });
    }
    if (!asynchronous || target.pageable) stream.drain();
    return OK;
}

int copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows, Stream& stream) {
    for (size_t i = 0; i < rows; i++)
        if (int code = copy((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width, stream, true)) return code;
    return OK;
}

int fill(void* to, int value, size_t n, Stream& stream) {
    if (!n) return OK;
    if (!is_device(to) || !find_block(to, n)) return INVALID_VALUE;
    char* at = shadow(to);
    if (stream.capture) {
        record(stream, [=] { memset(at, value, n); }, {{at, n}});
        return OK;
    }
    stream.push([=, &stream] {
        stream.linger();
        memset(at, value, n);
    });
    return OK;
}
}  // namespace sim

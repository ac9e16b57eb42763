/* A copy past the caches, for a target that nobody reads soon.

   An ordinary store first fetches the cache line that it overwrites. A streaming store does not, so a third
   less goes through the memory, which is what large copies wait for; and the source stays in the cache. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

enum { LINE_BYTES = 64 };

void uncached_copy(char *target, const char *source, size_t nbytes)
{
    size_t head = -(uintptr_t)target & (LINE_BYTES - 1);
    if (head > nbytes)
        head = nbytes;
    memcpy(target, source, head);
    target += head, source += head, nbytes -= head;
    for (; nbytes >= LINE_BYTES; target += LINE_BYTES, source += LINE_BYTES, nbytes -= LINE_BYTES) {
        const __m128i *from = (const __m128i *)source;
        __m128i *to = (__m128i *)target;
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
    }
    _mm_sfence(); /* streaming stores wait for nobody: order them before whatever says that the copy is done */
    memcpy(target, source, nbytes);
}

#else

void uncached_copy(char *target, const char *source, size_t nbytes)
{
    memcpy(target, source, nbytes);
}

#endif

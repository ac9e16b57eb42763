/* What copying between the host and an arena needs that Python would be too slow for (sums.py). */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Chunks that are hashed, compared with what the target had, and copied if that was something else; or compared
   with what they should be, and copied if they are; for as many as Python hands over at once. The hash is
   xxhash's, by the addresses of its functions (sums.py). */

struct sum {
    uint64_t low, high;
};

struct hasher {
    struct sum (*whole)(const void *, size_t);
    void *(*begin)(void); /* a state; then reset, updates, end, drop */
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    struct sum (*end)(const void *);
    int (*drop)(void *);
};

struct chunk {
    const char *source;
    char *target;
    uint64_t nbytes, padded_bytes, row;
};

struct row {
    struct sum sum;
    uint64_t known;
};

/* What is hashed and then copied at once: it fits into a core's own cache, where the second look finds it. */
enum { BLOCK_BYTES = 256 << 10, PROBE_BYTES = 4096 };

/* Begins a hash with a chunk's bytes, and copies them on the way. */
static void copy_hashing(const struct hasher *hash, void *state, const struct chunk *chunk)
{
    hash->reset(state);
    for (uint64_t done = 0; done < chunk->nbytes; done += BLOCK_BYTES) {
        uint64_t rest = chunk->nbytes - done, block = rest < BLOCK_BYTES ? rest : BLOCK_BYTES;
        hash->update(state, chunk->source + done, block);
        memcpy(chunk->target + done, chunk->source + done, block);
    }
}

/* Ends it with the zeros of a chunk's padding. */
static struct sum end_padded(const struct hasher *hash, void *state, const struct chunk *chunk)
{
    static const char zeros[4096];
    for (uint64_t rest = chunk->padded_bytes - chunk->nbytes; rest > 0;) {
        uint64_t part = rest < sizeof zeros ? rest : sizeof zeros;
        hash->update(state, zeros, part);
        rest -= part;
    }
    return hash->end(state);
}

static struct sum sum_of(const struct hasher *hash, void *state, const struct chunk *chunk)
{
    if (chunk->padded_bytes == chunk->nbytes)
        return hash->whole(chunk->source, chunk->nbytes);
    hash->reset(state);
    hash->update(state, chunk->source, chunk->nbytes);
    return end_padded(hash, state, chunk);
}

/* Whether a chunk is large, and something else than what its target has, as its beginning shows already. */
static int differs_at_once(const struct chunk *chunk)
{
    return chunk->nbytes > BLOCK_BYTES && memcmp(chunk->source, chunk->target, PROBE_BYTES);
}

/* Returns the bytes that were not copied because the target has them; -1 without memory for a state. A sum that is
   known already is not taken again. */
int64_t copy_changed(const struct hasher *hash, const struct chunk *chunks, size_t count, const struct row *before,
                     struct row *now)
{
    int64_t unchanged_bytes = 0;
    void *state = hash->begin();
    if (!state)
        return -1;
    for (const struct chunk *chunk = chunks; chunk < chunks + count; chunk++) {
        const struct row *had = before + chunk->row;
        struct row *row = now + chunk->row;
        memset(chunk->target + chunk->nbytes, 0, chunk->padded_bytes - chunk->nbytes);
        if (!row->known && differs_at_once(chunk)) {
            copy_hashing(hash, state, chunk);
            *row = (struct row){end_padded(hash, state, chunk), 1};
            continue;
        }
        if (!row->known)
            *row = (struct row){sum_of(hash, state, chunk), 1};
        if (had->known && had->sum.low == row->sum.low && had->sum.high == row->sum.high)
            unchanged_bytes += chunk->nbytes;
        else
            memcpy(chunk->target, chunk->source, chunk->nbytes);
    }
    hash->drop(state);
    return unchanged_bytes;
}

static int is_damaged(const struct hasher *hash, const struct chunk *chunk, const uint64_t *expected)
{
    return hash->whole(chunk->source, chunk->padded_bytes).low != expected[chunk->row];
}

/* Copies a chunk that is what it should be; returns whether it is something else. What chunks should be are the lower
   halves of their sums, with their padding; without any nothing is compared. */
static int copy_comparing(const struct hasher *hash, const struct chunk *chunk, const uint64_t *expected)
{
    if (expected && is_damaged(hash, chunk, expected))
        return 1;
    memcpy(chunk->target, chunk->source, chunk->nbytes);
    return 0;
}

/* Returns the position of the first chunk that is not what it should be: neither it nor what follows is copied; or their
   number. */
size_t copy_expected(const struct hasher *hash, const struct chunk *chunks, size_t count, const uint64_t *expected)
{
    size_t position = 0;
    while (position < count && !copy_comparing(hash, chunks + position, expected))
        position++;
    return position;
}

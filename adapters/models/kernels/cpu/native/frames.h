// Zstd frames of plain blocks (RFC 8878): content that is not compressed, with XXH64 over it. It is copied and hashed in one
// pass. zstd's own encoder searches for matches first, which takes three times as long, and finds none in rows of numbers.
// Words are taken as little-endian, which the processors are.

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define FRAME_MAGIC 0xfd2fb528u
#define FRAME_HEAD 9     // bytes: magic, descriptor, size of the content
#define ONE_SEGMENT 0xa4 // descriptor: four bytes of size, a checksum, no dictionary, no window
#define BLOCK_HEAD 3
#define BLOCK_BYTES (128l << 10) // the most that a block may have
#define FRAME_CHECKSUM 4
#define WRITTEN_BLOCKS 4         // hashed, then written in one call of the system: 512 KiB stay in the second cache
#define HASHED_AT_ONCE (16l << 10) // copied and hashed while it is in the first cache

// Bytes. From main memory hashing takes 0.10 to 0.11 s/GB with it, and 0.15 to 0.17 without (Xeon, 2.8 GHz).
#define FETCHED_AHEAD 4096

#define XX1 0x9e3779b185ebca87u
#define XX2 0xc2b2ae3d27d4eb4fu
#define XX3 0x165667b19e3779f9u
#define XX4 0x85ebca77c2b2ae63u
#define XX5 0x27d4eb2f165667c5u

typedef struct {
    uint64_t lanes[4];
    long count; // bytes so far: a multiple of 32
} xxh64_t;

static inline uint64_t rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

static inline uint64_t xx_word(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static inline uint64_t xx_round(uint64_t lane, uint64_t word) { return rotate(lane + word * XX2, 31) * XX1; }

static void xx_begin(xxh64_t *hash) {
    *hash = (xxh64_t){{XX1 + XX2, XX2, 0, 0 - XX1}, 0};
}

// Whole stripes of 32 bytes.
static void xx_stripes(xxh64_t *hash, const uint8_t *at, long bytes) {
    uint64_t a = hash->lanes[0], b = hash->lanes[1], c = hash->lanes[2], d = hash->lanes[3];
    for (const uint8_t *end = at + bytes; at < end; at += 32) {
        __builtin_prefetch(at + FETCHED_AHEAD);
        a = xx_round(a, xx_word(at));
        b = xx_round(b, xx_word(at + 8));
        c = xx_round(c, xx_word(at + 16));
        d = xx_round(d, xx_word(at + 24));
    }
    hash->lanes[0] = a, hash->lanes[1] = b, hash->lanes[2] = c, hash->lanes[3] = d;
    hash->count += bytes;
}

// The rest, less than 32 bytes; returns the hash of everything.
static uint64_t xx_end(const xxh64_t *hash, const uint8_t *at, long bytes) {
    const uint64_t *lanes = hash->lanes;
    uint64_t sum = lanes[2] + XX5; // of the seed 0
    if (hash->count) {
        sum = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
        for (int lane = 0; lane < 4; lane++) sum = (sum ^ xx_round(0, lanes[lane])) * XX1 + XX4;
    }
    sum += (uint64_t)(hash->count + bytes);
    for (; bytes >= 8; bytes -= 8, at += 8) sum = rotate(sum ^ xx_round(0, xx_word(at)), 27) * XX1 + XX4;
    if (bytes >= 4) {
        uint32_t word;
        memcpy(&word, at, 4);
        sum = rotate(sum ^ word * XX1, 23) * XX2 + XX3;
        bytes -= 4, at += 4;
    }
    for (; bytes; bytes--, at++) sum = rotate(sum ^ *at * XX5, 11) * XX1;
    sum = (sum ^ sum >> 33) * XX2;
    sum = (sum ^ sum >> 29) * XX3;
    return sum ^ sum >> 32;
}

// Bytes of the frame of so many bytes of content. A content of nothing has one empty block.
long rekindle_frame_bytes(long content) {
    const long blocks = content ? (content + BLOCK_BYTES - 1) / BLOCK_BYTES : 1;
    return FRAME_HEAD + content + BLOCK_HEAD * blocks + FRAME_CHECKSUM;
}

// Writes the frame of `content` bytes, fewer than 4 GiB, to `out`, which has `rekindle_frame_bytes`.
void rekindle_pack_frame(const uint8_t *data, long content, uint8_t *out) {
    const uint32_t magic = FRAME_MAGIC, size = (uint32_t)content;
    xxh64_t hash;
    xx_begin(&hash);
    memcpy(out, &magic, 4);
    out[4] = ONE_SEGMENT;
    memcpy(out + 5, &size, 4);
    out += FRAME_HEAD;
    long at = 0;
    do {
        const long bytes = content - at < BLOCK_BYTES ? content - at : BLOCK_BYTES;
        const uint32_t head = (uint32_t)bytes << 3 | (at + bytes == content);
        memcpy(out, &head, BLOCK_HEAD);
        out += BLOCK_HEAD;
        for (long done = 0; done < bytes; done += HASHED_AT_ONCE) {
            const long now = bytes - done < HASHED_AT_ONCE ? bytes - done : HASHED_AT_ONCE;
            memcpy(out + done, data + at + done, now);
            xx_stripes(&hash, data + hash.count, (at + done + now - hash.count) & ~31l);
        }
        out += bytes, at += bytes;
    } while (at < content);
    const uint32_t sum = (uint32_t)xx_end(&hash, data + hash.count, content - hash.count);
    memcpy(out, &sum, FRAME_CHECKSUM);
}

// A frame that is read block by block, straight to its place. at: of the file. out: of its content. done: bytes of the content
// that were read, of which hash.count are hashed. failed: 1 if it is another frame or cannot be read.
typedef struct {
    int file;
    long at, content, done, failed;
    uint8_t *out;
    xxh64_t hash;
} frame_t;

// Reads the next block of a frame.
static void read_block(frame_t *frame) {
    uint8_t expected[FRAME_HEAD + BLOCK_HEAD], found[FRAME_HEAD + BLOCK_HEAD];
    const uint32_t magic = FRAME_MAGIC, size = (uint32_t)frame->content;
    const long bytes = frame->content - frame->done < BLOCK_BYTES ? frame->content - frame->done : BLOCK_BYTES;
    const uint32_t head = (uint32_t)bytes << 3 | (frame->done + bytes == frame->content);
    const long before = frame->done ? 0 : FRAME_HEAD, heads = before + BLOCK_HEAD;
    if (before) {
        memcpy(expected, &magic, 4);
        expected[4] = ONE_SEGMENT;
        memcpy(expected + 5, &size, 4);
    }
    memcpy(expected + before, &head, BLOCK_HEAD);
    const struct iovec parts[2] = {{found, (size_t)heads}, {frame->out + frame->done, (size_t)bytes}};
    frame->failed = preadv(frame->file, parts, 2, frame->at) != heads + bytes || memcmp(found, expected, (size_t)heads);
    frame->at += heads + bytes, frame->done += bytes;
}

static void hash_block(frame_t *frame) {
    xx_stripes(&frame->hash, frame->out + frame->hash.count, (frame->done - frame->hash.count) & ~31l);
}

// Reads the rest of a frame. `sum` gets its checksum, which is compared.
static void end_frame(frame_t *frame, uint32_t *sum) {
    hash_block(frame); // of which that was not done
    while (!frame->failed && frame->done < frame->content) {
        read_block(frame);
        if (!frame->failed) hash_block(frame);
    }
    if (frame->failed) return;
    const uint8_t *rest = frame->out + frame->hash.count;
    frame->failed = pread(frame->file, sum, FRAME_CHECKSUM, frame->at) != FRAME_CHECKSUM ||
                    *sum != (uint32_t)xx_end(&frame->hash, rest, frame->content - frame->hash.count);
}

#define HASHED_TOGETHER 4 // frames

#if defined(__x86_64__) && defined(__GNUC__)
#define FOR_FOUR __attribute__((target("avx512f,avx512dq,prefer-vector-width=512")))

static long hashes_together(void) { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"); }

// `xx_round` in each of eight lanes. The second product is made of three of 32 bits, two of which begin as soon as the sum is
// there: the next word waits for it, and a product of 64 bits takes twice as long.
FOR_FOUR static inline __m512i xx_wide_round(__m512i lanes, const uint8_t *one, const uint8_t *two) {
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)one));
    const __m512i words = _mm512_inserti64x4(first, _mm256_loadu_si256((const __m256i *)two), 1);
    const __m512i low = _mm512_set1_epi64(XX1 & 0xffffffffu), high = _mm512_set1_epi64(XX1 >> 32);
    const __m512i sum = _mm512_add_epi64(lanes, _mm512_mullo_epi64(words, _mm512_set1_epi64((long long)XX2)));
    const __m512i lower = _mm512_rol_epi64(sum, 31), upper = _mm512_srli_epi64(sum, 1); // halves of the rotated sum
    const __m512i cross = _mm512_add_epi64(_mm512_mul_epu32(upper, low), _mm512_mul_epu32(lower, high));
    return _mm512_add_epi64(_mm512_mul_epu32(lower, low), _mm512_slli_epi64(cross, 32));
}

FOR_FOUR static inline __m512i get_lanes(const xxh64_t *one, const xxh64_t *two) {
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)one->lanes));
    return _mm512_inserti64x4(first, _mm256_loadu_si256((const __m256i *)two->lanes), 1);
}

FOR_FOUR static inline void put_lanes(xxh64_t *one, xxh64_t *two, __m512i lanes) {
    _mm256_storeu_si256((__m256i *)one->lanes, _mm512_castsi512_si256(lanes));
    _mm256_storeu_si256((__m256i *)two->lanes, _mm512_extracti64x4_epi64(lanes, 1));
}

// Hashes a whole block of each of four frames. One frame alone waits for its own products: 0.072 s/GB in the first cache.
// Two frames take as long in vectors, four take 0.041 (Xeon, 2.8 GHz).
FOR_FOUR static void hash_blocks(frame_t *frames) {
    const uint8_t *from[HASHED_TOGETHER];
    for (long one = 0; one < HASHED_TOGETHER; one++) {
        from[one] = frames[one].out + frames[one].hash.count;
        frames[one].hash.count += BLOCK_BYTES;
    }
    __m512i some = get_lanes(&frames[0].hash, &frames[1].hash), others = get_lanes(&frames[2].hash, &frames[3].hash);
    for (long at = 0; at < BLOCK_BYTES; at += 32) {
        some = xx_wide_round(some, from[0] + at, from[1] + at);
        others = xx_wide_round(others, from[2] + at, from[3] + at);
    }
    put_lanes(&frames[0].hash, &frames[1].hash, some);
    put_lanes(&frames[2].hash, &frames[3].hash, others);
}
#else
static long hashes_together(void) { return 0; }
static void hash_blocks(frame_t *frames) { (void)frames; }
#endif

static long have_whole_blocks(const frame_t *frames) {
    for (long one = 0; one < HASHED_TOGETHER; one++)
        if (frames[one].failed || frames[one].content - frames[one].done < BLOCK_BYTES) return 0;
    return 1;
}

// Reads whole blocks of four frames while all have some, and hashes them while they are in the second cache.
static void read_four(frame_t *frames) {
    while (have_whole_blocks(frames)) {
        long failed = 0;
        for (long one = 0; one < HASHED_TOGETHER; one++) {
            read_block(frames + one);
            failed |= frames[one].failed;
        }
        if (failed) return; // what is not hashed is hashed by `end_frame`
        hash_blocks(frames);
    }
}

// Reads exactly `length` bytes at `at` of a file. Returns 0, or -1 if there are fewer or reading fails.
static long read_exactly(int file, long at, uint8_t *out, long length) {
    for (long done = 0; done < length;) {
        const long count = pread(file, out + done, (size_t)(length - done), at + done);
        if (count <= 0) return -1;
        done += count;
    }
    return 0;
}

// Frames that are read together, each with the place of its checksum and of a count of frames that failed.
typedef struct {
    frame_t frames[HASHED_TOGETHER];
    uint32_t *sums[HASHED_TOGETHER];
    long *failures[HASHED_TOGETHER];
    long count;
} group_t;

static void read_group(group_t *group) {
    if (group->count == HASHED_TOGETHER && hashes_together()) read_four(group->frames);
    for (long one = 0; one < group->count; one++) {
        end_frame(group->frames + one, group->sums[one]);
        *group->failures[one] += group->frames[one].failed;
    }
    group->count = 0;
}

// Adds neighbouring frames of a file from `at` on to a group, which is read whenever it is full. The frames hold `content`
// bytes, `frame` in each and fewer in the last. `sums` gets their checksums, once they are read.
static void add_frames(
    group_t *group, int file, long at, uint8_t *out, long content, long frame, uint32_t *sums, long *failures
) {
    for (long done = 0; done < content; done += frame) {
        const long bytes = content - done < frame ? content - done : frame, one = group->count++;
        group->frames[one] = (frame_t){.file = file, .at = at, .content = bytes, .out = out + done};
        group->frames[one].failed = bytes > UINT32_MAX;
        xx_begin(&group->frames[one].hash);
        group->sums[one] = sums++;
        group->failures[one] = failures;
        at += rekindle_frame_bytes(bytes);
        if (group->count == HASHED_TOGETHER) read_group(group);
    }
}

// Reads such frames straight into `out`. Returns 0, or -1 if that fails or they are not byte for byte the frames that
// `rekindle_pack_frame` writes; then `out` may hold anything.
long rekindle_read_frames(int file, long at, uint8_t *out, long content, long frame, uint32_t *sums) {
    group_t group = {.count = 0};
    long failures = 0;
    add_frames(&group, file, at, out, content, frame, sums, &failures);
    read_group(&group);
    return failures ? -1 : 0;
}

// A whole file of `size` bytes: a first part of `head` bytes, frames as above, and a last part of `table` bytes. `ends` gets
// the first and the last part as they are. failures: of its frames, 0 at first. found: 0 if it was read, NOT_CACHED, or
// NO_SUCH_FILE if it is no such file or cannot be read.
typedef struct {
    const char *path;
    long size, head, table;
    uint8_t *ends, *out;
    long content, frame;
    uint32_t *sums;
    long failures, found;
} stored_t;

#define NO_SUCH_FILE -1
#define NOT_CACHED 1
#define PAGE_BYTES 4096

// Are more than half of a file's pages in the page cache? The question itself does not load them.
static long is_cached(int file, long size) {
#ifdef __linux__
    const long pages = (size + PAGE_BYTES - 1) / PAGE_BYTES;
    unsigned char *found = malloc((size_t)pages);
    void *mapped = found ? mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    long there = pages; // where nobody knows
    if (mapped != MAP_FAILED) {
        if (sysconf(_SC_PAGESIZE) == PAGE_BYTES && !mincore(mapped, (size_t)size, found)) {
            there = 0;
            for (long page = 0; page < pages; page++) there += found[page] & 1;
        }
        munmap(mapped, (size_t)size);
    }
    free(found);
    return 2 * there > pages;
#else
    (void)file, (void)size;
    return 1;
#endif
}

// Opens a file and reads its first and its last part. Returns the file, or -1; then `found` says why.
static int open_stored(int folder, stored_t *stored, int only_cached) {
    const int flags = O_RDONLY | O_NONBLOCK | O_CLOEXEC; // a pipe of that name would wait for its writer
    const int file = openat(folder, stored->path, only_cached ? flags | O_NOFOLLOW : flags);
    stored->found = NO_SUCH_FILE;
    if (file < 0) return -1;
    struct stat facts;
    const long before = stored->size - stored->table;
    const long fits = !fstat(file, &facts) && S_ISREG(facts.st_mode) && facts.st_size == stored->size;
    if (fits && only_cached && !is_cached(file, stored->size))
        stored->found = NOT_CACHED;
    else if (fits && !read_exactly(file, 0, stored->ends, stored->head) &&
             !read_exactly(file, before, stored->ends + stored->head, stored->table)) {
        stored->found = 0;
        return file;
    }
    close(file);
    return -1;
}

// Opens and reads files. Frames of neighbouring files are hashed together, so some files are open at the same time. folder:
// where relative paths begin. only_cached: leave those that the page cache does not hold, and follow no links.
void rekindle_read_files(int folder, stored_t *files, long count, int only_cached) {
    group_t group = {.count = 0};
    int open_files[HASHED_TOGETHER];
    long open_count = 0;
    for (long at = 0; at < count; at++) {
        stored_t *const stored = files + at;
        const int file = open_stored(folder, stored, only_cached);
        if (file < 0) continue;
        open_files[open_count++] = file;
        add_frames(
            &group, file, stored->head, stored->out, stored->content, stored->frame, stored->sums, &stored->failures
        );
        if (group.count && open_count < HASHED_TOGETHER && at + 1 < count) continue;
        read_group(&group);
        while (open_count) close(open_files[--open_count]);
    }
    read_group(&group);
    while (open_count) close(open_files[--open_count]);
    for (long at = 0; at < count; at++)
        if (files[at].failures) files[at].found = NO_SUCH_FILE;
}

// Writes all of these parts, which it changes, to the end of a file. Returns 0 or the number of the error.
static int write_parts(int file, struct iovec *parts, int count) {
    while (count) {
        const long written = writev(file, parts, count);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return written ? errno : EIO;
        long left = written;
        while (count && left >= (long)parts->iov_len) left -= (long)parts->iov_len, parts++, count--;
        if (count) parts->iov_base = (uint8_t *)parts->iov_base + left, parts->iov_len -= (size_t)left;
    }
    return 0;
}

// Writes the frame of a content that `rekindle_pack_frame` makes, without a copy of it: blocks are hashed, and written while
// they are in the processor's cache. `sum` gets the checksum. Returns 0 or the number of the error.
static int write_frame(int file, const uint8_t *data, long content, uint32_t *sum) {
    uint8_t heads[WRITTEN_BLOCKS][FRAME_HEAD + BLOCK_HEAD];
    struct iovec parts[2 * WRITTEN_BLOCKS + 1];
    const uint32_t magic = FRAME_MAGIC, size = (uint32_t)content;
    xxh64_t hash;
    xx_begin(&hash);
    for (long at = 0; at < content;) {
        int count = 0;
        for (int block = 0; block < WRITTEN_BLOCKS && at < content; block++) {
            const long bytes = content - at < BLOCK_BYTES ? content - at : BLOCK_BYTES;
            const uint32_t head = (uint32_t)bytes << 3 | (at + bytes == content);
            const long before = at ? 0 : FRAME_HEAD;
            memcpy(heads[block], &magic, 4);
            heads[block][4] = ONE_SEGMENT;
            memcpy(heads[block] + 5, &size, 4);
            memcpy(heads[block] + before, &head, BLOCK_HEAD);
            parts[count++] = (struct iovec){heads[block], (size_t)(before + BLOCK_HEAD)};
            parts[count++] = (struct iovec){(void *)(data + at), (size_t)bytes};
            at += bytes;
            xx_stripes(&hash, data + hash.count, (at - hash.count) & ~31l);
        }
        if (at == content) {
            *sum = (uint32_t)xx_end(&hash, data + hash.count, content - hash.count);
            parts[count++] = (struct iovec){sum, FRAME_CHECKSUM};
        }
        const int error = write_parts(file, parts, count);
        if (error) return error;
    }
    return 0;
}

// Makes a file of frames of `content` bytes, `frame` in each and fewer in the last, behind `head` bytes that are written
// later. `sums` gets their checksums. Returns the open file, or minus the number of the error; then nothing is left.
int rekindle_begin_file(
    const char *temporary, long head, const uint8_t *data, long content, long frame, uint32_t *sums
) {
    const int file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0) return -errno;
    int error = lseek(file, head, SEEK_SET) < 0 ? errno : 0;
    for (long at = 0; !error && at < content; at += frame)
        error = write_frame(file, data + at, content - at < frame ? content - at : frame, sums++);
    if (!error) return file;
    close(file);
    unlink(temporary);
    return -error;
}

// Writes the rest of such a file behind its frames, then its head, and closes it. It gets its name: in place of a file of
// that name if `replaces` is not 0. Returns 0 or the number of the error. In any case the temporary name is gone.
int rekindle_end_file(
    int file, const char *temporary, const char *path, int replaces, const uint8_t *head, long head_bytes,
    const uint8_t *rest, long rest_bytes
) {
    struct iovec part = {(void *)rest, (size_t)rest_bytes};
    int error = write_parts(file, &part, 1);
    if (!error && lseek(file, 0, SEEK_SET) < 0) error = errno;
    part = (struct iovec){(void *)head, (size_t)head_bytes};
    if (!error) error = write_parts(file, &part, 1);
    if (close(file) && !error) error = errno;
    if (!error && (replaces ? rename(temporary, path) : link(temporary, path))) error = errno;
    unlink(temporary); // it is gone if it was renamed
    return error;
}

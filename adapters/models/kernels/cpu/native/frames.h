// Zstd frames of plain blocks (RFC 8878): content that is not compressed, with XXH64 over it. It is copied and hashed in one
// pass. zstd's own encoder searches for matches first, which takes three times as long, and finds none in rows of numbers.
// Words are taken as little-endian, which the processors are.

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
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

// Reads exactly such a frame of `length` bytes at `at` of a file, its content straight into `out`. Returns its checksum, or
// -1 if that fails or it is not byte for byte the frame that `rekindle_pack_frame` writes; then `out` may hold anything.
static long read_frame(int file, long at, long length, uint8_t *out, long content) {
    uint8_t expected[FRAME_HEAD + BLOCK_HEAD], found[FRAME_HEAD + BLOCK_HEAD];
    const uint32_t magic = FRAME_MAGIC, size = (uint32_t)content;
    uint32_t sum;
    if (content <= 0 || content > UINT32_MAX || length != rekindle_frame_bytes(content)) return -1;
    memcpy(expected, &magic, 4);
    expected[4] = ONE_SEGMENT;
    memcpy(expected + 5, &size, 4);
    long heads = FRAME_HEAD; // bytes before the head of the block
    xxh64_t hash;
    xx_begin(&hash);
    for (long done = 0; done < content;) {
        const long bytes = content - done < BLOCK_BYTES ? content - done : BLOCK_BYTES;
        const uint32_t head = (uint32_t)bytes << 3 | (done + bytes == content);
        memcpy(expected + heads, &head, BLOCK_HEAD);
        heads += BLOCK_HEAD;
        const struct iovec parts[2] = {{found, (size_t)heads}, {out + done, (size_t)bytes}};
        if (preadv(file, parts, 2, at) != heads + bytes || memcmp(found, expected, (size_t)heads)) return -1;
        at += heads + bytes, done += bytes, heads = 0;
        xx_stripes(&hash, out + hash.count, (done - hash.count) & ~31l);
    }
    if (pread(file, &sum, FRAME_CHECKSUM, at) != FRAME_CHECKSUM) return -1;
    return sum == (uint32_t)xx_end(&hash, out + hash.count, content - hash.count) ? (long)sum : -1;
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

// Reads neighbouring frames of a file from `at` on, which hold `content` bytes, `frame` in each and fewer in the last,
// straight into `out`. `sums` gets their checksums, which are compared. Returns 0, or -1 as `read_frame` does.
long rekindle_read_frames(int file, long at, uint8_t *out, long content, long frame, uint32_t *sums) {
    for (long done = 0; done < content; done += frame) {
        const long bytes = content - done < frame ? content - done : frame;
        const long length = rekindle_frame_bytes(bytes);
        const long sum = read_frame(file, at, length, out + done, bytes);
        if (sum < 0) return -1;
        *sums++ = (uint32_t)sum;
        at += length;
    }
    return 0;
}

// Opens and reads a whole file of `size` bytes: a first part of `head` bytes, such frames, and a last part of `table`
// bytes. `ends` gets the first and the last part as they are. Returns 0, or -1 if it is no such file or cannot be read.
long rekindle_read_file(
    const char *path, long size, long head, uint8_t *ends, long table, uint8_t *out, long content, long frame,
    uint32_t *sums
) {
    const int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); // a pipe of that name would wait for its writer
    if (file < 0) return -1;
    struct stat facts;
    long failed = fstat(file, &facts) || !S_ISREG(facts.st_mode) || facts.st_size != size;
    failed = failed || read_exactly(file, 0, ends, head) || read_exactly(file, size - table, ends + head, table);
    failed = failed || rekindle_read_frames(file, head, out, content, frame, sums);
    close(file);
    return failed ? -1 : 0;
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

// Zstd frames of plain blocks (RFC 8878): content that is not compressed. zstd's own encoder searches for matches first, which
// takes three times as long, and finds none in rows of numbers. A frame of rows has no checksum of zstd's: its blocks have the
// sums of sums.h, taken while they are in the processor's cache. The frame of a head has one, XXH64.

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define FRAME_MAGIC 0xfd2fb528u
#define FRAME_HEAD 9       // bytes: magic, descriptor, size of the content
#define ONE_SEGMENT 0xa0   // descriptor: four bytes of size, no checksum, no dictionary, no window
#define WITH_CHECKSUM 0x04 // added to the descriptor
#define BLOCK_HEAD 3
#define BLOCK_BYTES (128l << 10) // the most that a block may have
#define FRAME_CHECKSUM 4
#define WRITTEN_BLOCKS 4 // in one call of the system: 512 KiB are in the second cache behind it

// Writes the head of the block at `at` of a content, behind that of the frame if it is the first one. Returns its bytes.
static long put_heads(uint8_t *out, uint8_t descriptor, long content, long at) {
    const uint32_t magic = FRAME_MAGIC, size = (uint32_t)content;
    const long before = at ? 0 : FRAME_HEAD, left = content - at, bytes = left < BLOCK_BYTES ? left : BLOCK_BYTES;
    const uint32_t head = (uint32_t)bytes << 3 | (bytes == left);
    if (before) {
        memcpy(out, &magic, 4);
        out[4] = descriptor;
        memcpy(out + 5, &size, 4);
    }
    memcpy(out + before, &head, BLOCK_HEAD);
    return before + BLOCK_HEAD;
}

static inline uint64_t rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

static inline uint64_t xx_round(uint64_t lane, uint64_t word) { return rotate(lane + word * XX2, 31) * XX1; }

// XXH64 of a content, the checksum of zstd's frames.
static uint64_t compute_xxh64(const uint8_t *at, long bytes) {
    uint64_t lanes[4] = {XX1 + XX2, XX2, 0, 0 - XX1};
    uint64_t sum = XX5; // of the seed 0
    const uint64_t size = (uint64_t)bytes;
    if (bytes >= 32) {
        for (; bytes >= 32; bytes -= 32, at += 32)
            for (int lane = 0; lane < 4; lane++) lanes[lane] = xx_round(lanes[lane], take_word(at + 8 * lane));
        sum = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
        for (int lane = 0; lane < 4; lane++) sum = (sum ^ xx_round(0, lanes[lane])) * XX1 + XX4;
    }
    sum += size;
    for (; bytes >= 8; bytes -= 8, at += 8) sum = rotate(sum ^ xx_round(0, take_word(at)), 27) * XX1 + XX4;
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

// Bytes of the frame of so many bytes of rows, at least one.
static long count_frame_bytes(long content) {
    return FRAME_HEAD + content + BLOCK_HEAD * ((content + BLOCK_BYTES - 1) / BLOCK_BYTES);
}

// Writes the frame of a head of `content` bytes, at least one and fewer than 4 GiB, with its checksum. `out` has room for it.
void rekindle_pack_head(const uint8_t *data, long content, uint8_t *out) {
    for (long at = 0; at < content; at += BLOCK_BYTES) {
        const long bytes = content - at < BLOCK_BYTES ? content - at : BLOCK_BYTES;
        out += put_heads(out, ONE_SEGMENT | WITH_CHECKSUM, content, at);
        memcpy(out, data + at, (size_t)bytes);
        out += bytes;
    }
    const uint32_t sum = (uint32_t)compute_xxh64(data, content);
    memcpy(out, &sum, FRAME_CHECKSUM);
}

// Turns the frame of a head into its content, which begins where the frame did. Returns 0, or -1 if it is not byte for byte such
// a frame as `rekindle_pack_head` writes; then it may hold anything.
static long unpack_head(uint8_t *frame, long content) {
    uint8_t expected[FRAME_HEAD + BLOCK_HEAD];
    const uint8_t *from = frame;
    for (long at = 0; at < content; at += BLOCK_BYTES) {
        const long bytes = content - at < BLOCK_BYTES ? content - at : BLOCK_BYTES;
        const long heads = put_heads(expected, ONE_SEGMENT | WITH_CHECKSUM, content, at);
        if (memcmp(from, expected, (size_t)heads)) return -1;
        memmove(frame + at, from + heads, (size_t)bytes);
        from += heads + bytes;
    }
    const uint32_t sum = (uint32_t)compute_xxh64(frame, content);
    return memcmp(from, &sum, FRAME_CHECKSUM) ? -1 : 0;
}

// Writes the frame of `content` bytes of rows, at least one and fewer than 4 GiB, to `out`, which has room for it. `sums` gets
// the sums of its blocks.
void rekindle_pack_rows(const uint8_t *data, long content, uint8_t *out, uint8_t *sums) {
    const int form = find_form();
    for (long at = 0; at < content; at += BLOCK_BYTES, sums += SUM_BYTES) {
        const long bytes = content - at < BLOCK_BYTES ? content - at : BLOCK_BYTES;
        out += put_heads(out, ONE_SEGMENT, content, at);
        sum_content(data + at, bytes, sums, form);
        memcpy(out, data + at, (size_t)bytes); // from the cache
        out += bytes;
    }
}

// --- reading ---

// Reads exactly `length` bytes at `at` of a file. Returns 0, or -1 if there are fewer or reading fails.
static long read_exactly(int file, long at, uint8_t *out, long length) {
    for (long done = 0; done < length;) {
        const long count = pread(file, out + done, (size_t)(length - done), at + done);
        if (count <= 0) return -1;
        done += count;
    }
    return 0;
}

// Reads a frame of rows block by block, straight to its place, and sums each block while it is in the cache. `at` of the file
// moves on behind it. Returns 0, or -1 if it is another frame or cannot be read.
static long read_frame(int file, long *at, uint8_t *out, long content, uint8_t *sums, int form) {
    uint8_t expected[FRAME_HEAD + BLOCK_HEAD], found[FRAME_HEAD + BLOCK_HEAD];
    if (content > UINT32_MAX) return -1;
    for (long done = 0; done < content; done += BLOCK_BYTES, sums += SUM_BYTES) {
        const long bytes = content - done < BLOCK_BYTES ? content - done : BLOCK_BYTES;
        const long heads = put_heads(expected, ONE_SEGMENT, content, done);
        const struct iovec parts[2] = {{found, (size_t)heads}, {out + done, (size_t)bytes}};
        if (preadv(file, parts, 2, *at) != heads + bytes || memcmp(found, expected, (size_t)heads)) return -1;
        sum_content(out + done, bytes, sums, form);
        *at += heads + bytes;
    }
    return 0;
}

// Reads neighbouring frames of a file from `at` on straight into `out`. They hold `content` bytes, `frame` in each and fewer
// in the last. `sums` gets the sums of their blocks. Returns 0, or -1 if that fails or they are not byte for byte such frames
// as `rekindle_pack_rows` writes; then `out` may hold anything.
long rekindle_read_frames(int file, long at, uint8_t *out, long content, long frame, uint8_t *sums) {
    const int form = find_form();
    for (long done = 0; done < content; done += frame) {
        const long bytes = content - done < frame ? content - done : frame;
        if (read_frame(file, &at, out + done, bytes, sums, form)) return -1;
        sums += SUM_BYTES * ((bytes + BLOCK_BYTES - 1) / BLOCK_BYTES);
    }
    return 0;
}

// A whole file of `size` bytes: a first part of `head` bytes, frames as above, and a last part of `table` bytes. `ends` gets
// the first and the last part as they are; if the first one is a head that is not compressed, its content of `plain` bytes
// stands there instead, and else `plain` is 0. found: 0 if it was read, NOT_CACHED, or NO_SUCH_FILE if it is no such file or
// cannot be read.
typedef struct {
    const char *path;
    long size, head, plain, table;
    uint8_t *ends, *out;
    long content, frame;
    uint8_t *sums;
    long found;
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
             !read_exactly(file, before, stored->ends + stored->head, stored->table) &&
             !(stored->plain && unpack_head(stored->ends, stored->plain))) {
        stored->found = 0;
        return file;
    }
    close(file);
    return -1;
}

// Opens and reads files, one after the other. folder: where relative paths begin. only_cached: leave those that the page cache
// does not hold, and follow no links. Returns how many files were not read.
long rekindle_read_files(int folder, stored_t *files, long count, int only_cached) {
    long missing = 0;
    for (stored_t *stored = files; stored < files + count; stored++) {
        const int file = open_stored(folder, stored, only_cached);
        if (file >= 0) {
            if (rekindle_read_frames(file, stored->head, stored->out, stored->content, stored->frame, stored->sums))
                stored->found = NO_SUCH_FILE;
            close(file);
        }
        missing += stored->found != 0;
    }
    return missing;
}

// --- writing ---

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

// Sums whole blocks of a content, of which the last one may be shorter. Returns the place behind their sums.
static uint8_t *sum_written(const uint8_t *data, long content, uint8_t *sums, int form) {
    for (long at = 0; at < content; at += BLOCK_BYTES, sums += SUM_BYTES)
        sum_content(data + at, content - at < BLOCK_BYTES ? content - at : BLOCK_BYTES, sums, form);
    return sums;
}

// Writes the frame of `content` bytes of rows without a copy of them. `sums` gets the sums of its blocks. The system reads
// blocks from main memory, and they are summed behind that, from the processor's cache: 0.025 s/GB more than writing alone, and
// 0.06 the other way round (Xeon with AMX). Returns 0 or the number of the error.
static int write_frame(int file, const uint8_t *data, long content, uint8_t *sums, int form) {
    uint8_t heads[WRITTEN_BLOCKS][FRAME_HEAD + BLOCK_HEAD];
    struct iovec parts[2 * WRITTEN_BLOCKS];
    for (long at = 0; at < content;) {
        const long begin = at;
        int count = 0;
        for (int block = 0; block < WRITTEN_BLOCKS && at < content; block++) {
            const long bytes = content - at < BLOCK_BYTES ? content - at : BLOCK_BYTES;
            const long head = put_heads(heads[block], ONE_SEGMENT, content, at);
            parts[count++] = (struct iovec){heads[block], (size_t)head};
            parts[count++] = (struct iovec){(void *)(data + at), (size_t)bytes};
            at += bytes;
        }
        const int error = write_parts(file, parts, count);
        if (error) return error;
        sums = sum_written(data + begin, at - begin, sums, form);
    }
    return 0;
}

// Makes a file of frames of rows of `content` bytes, `frame` in each and fewer in the last, behind `head` bytes that are written
// later. `sums` gets the sums of their blocks. Returns the open file, or minus the number of the error; then nothing is left.
int rekindle_begin_file(
    const char *temporary, long head, const uint8_t *data, long content, long frame, uint8_t *sums
) {
    const int file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0) return -errno;
    int error = lseek(file, head, SEEK_SET) < 0 ? errno : 0;
    for (long at = 0; !error && at < content; at += frame) {
        const long bytes = content - at < frame ? content - at : frame;
        error = write_frame(file, data + at, bytes, sums, find_form());
        sums += SUM_BYTES * ((bytes + BLOCK_BYTES - 1) / BLOCK_BYTES);
    }
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

/* The calls of the CUDA driver that the ballast makes, over cards that are files.
 *
 * The folder FAKE_CUDA holds `cards`, a line for each: NAME|TOTAL_MIB|INTEGRATED|COMPUTE_MODE, and
 * `faults`, lines of FUNCTION CODE, read at every call; the code -1 never returns, and leaves the file
 * `hangs`. Card i is the file `card-i`: one number of bytes for each process that has a context. A process locks its number for
 * as long as it lives, and the kernel drops that lock however it dies: numbers without a lock count
 * for nothing, as memory of a dead process is free.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define PAGE (2 * MIB)
#define RESERVED (300 * MIB) /* by the driver, before anybody asks */
#define CONTEXT (100 * MIB)  /* what a context takes */
#ifndef EXTRA
#define EXTRA 0 /* what a block takes beyond its size, by `bytes` asked for and `made` blocks before it */
#endif
#define SLOTS 64
#define MUTEX SLOTS /* its lock lies behind those of the numbers */
#define CARDS 8
#define BLOCKS 4096

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };

struct card {
    char name[128];
    uint64_t total;
    int integrated, mode;
    int file, slot; /* of this process, once it has a context */
    uint64_t used;  /* by this process */
};

static struct card cards[CARDS];
static int visible[CARDS], count, current = -1;
static uint64_t blocks[BLOCKS], made;
static int block_card[BLOCKS];

static FILE *open_text(const char *name, const char *mode) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("FAKE_CUDA"), name);
    return fopen(path, mode);
}

static int fault(const char *function) {
    char name[64];
    int code, found = SUCCESS;
    FILE *text = open_text("faults", "r");
    while (text && fscanf(text, "%63s %d", name, &code) == 2)
        if (!strcmp(name, function)) found = code;
    if (text) fclose(text);
    if (found == -1 && (text = open_text("hangs", "w"))) fclose(text);
    while (found == -1) pause();
    return found;
}

#define MAY_FAIL do { int code_ = fault(__func__); if (code_) return code_; } while (0)

static void lock(int file, int what, short type) {
    struct flock wanted = {.l_type = type, .l_whence = SEEK_SET, .l_start = what * 8, .l_len = 8};
    while (fcntl(file, F_SETLKW, &wanted)) {}
}

static int is_locked(int file, int slot) { /* by another process */
    struct flock asked = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot * 8, .l_len = 8};
    return !fcntl(file, F_GETLK, &asked) && asked.l_type != F_UNLCK;
}

static int open_card(int card) {
    char path[4096];
    snprintf(path, sizeof path, "%s/card-%d", getenv("FAKE_CUDA"), card);
    return open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
}

static uint64_t free_bytes(const struct card *card, int file) {
    uint64_t taken = RESERVED + card->used, bytes;
    for (int slot = 0; slot < SLOTS; slot++)
        if (is_locked(file, slot) && pread(file, &bytes, 8, slot * 8) == 8) taken += bytes;
    return taken > card->total ? 0 : card->total - taken;
}

static uint64_t look(const struct card *card, int file) { /* never between two steps of another process */
    lock(file, MUTEX, F_RDLCK);
    uint64_t bytes = free_bytes(card, file);
    lock(file, MUTEX, F_UNLCK);
    return bytes;
}

static int take(struct card *card, uint64_t bytes) {
    int code = OUT_OF_MEMORY;
    lock(card->file, MUTEX, F_WRLCK);
    if (free_bytes(card, card->file) >= bytes) {
        card->used += bytes;
        code = pwrite(card->file, &card->used, 8, card->slot * 8) == 8 ? SUCCESS : INVALID_VALUE;
    }
    lock(card->file, MUTEX, F_UNLCK);
    return code;
}

static void read_cards(void) {
    FILE *text = open_text("cards", "r");
    const char *shown = getenv("CUDA_VISIBLE_DEVICES");
    int all = 0;
    while (text && all < CARDS && fscanf(text, " %127[^|]|%lu|%d|%d", cards[all].name, &cards[all].total,
                                         &cards[all].integrated, &cards[all].mode) == 4)
        cards[all++].total *= MIB;
    if (text) fclose(text);
    count = 0;
    for (int card = 0; card < all; card++)
        if (!shown || strchr(shown, '0' + card)) visible[count++] = card;
}

int cuInit(unsigned flags) {
    MAY_FAIL;
    read_cards();
    return count ? SUCCESS : NO_DEVICE;
}

int cuDeviceGetCount(int *found) {
    MAY_FAIL;
    *found = count;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    MAY_FAIL;
    if (ordinal < 0 || ordinal >= count) return INVALID_DEVICE;
    *device = visible[ordinal];
    return SUCCESS;
}

int cuDeviceGetName(char *name, int length, int device) {
    MAY_FAIL;
    snprintf(name, length, "%s", cards[device].name);
    return SUCCESS;
}

#ifdef OLD
int cuDeviceGetUuid(unsigned char *uuid, int device) {
#else
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
#endif
    MAY_FAIL;
    for (int i = 0; i < 16; i++) uuid[i] = 16 * device + i;
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    MAY_FAIL;
    if (attribute != 18 && attribute != 20) return INVALID_VALUE;
    *value = attribute == 18 ? cards[device].integrated : cards[device].mode;
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    MAY_FAIL;
    struct card *card = &cards[device];
    card->file = open_card(device);
    lock(card->file, MUTEX, F_WRLCK);
    for (card->slot = 0; card->slot < SLOTS; card->slot++) {
        struct flock mine = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = card->slot * 8, .l_len = 8};
        if (!fcntl(card->file, F_SETLK, &mine)) break;
    }
    int written = pwrite(card->file, &card->used, 8, card->slot * 8) == 8; /* over the number of a dead one */
    lock(card->file, MUTEX, F_UNLCK);
    if (card->slot == SLOTS || !written) return OUT_OF_MEMORY;
    *context = (void *)(uintptr_t)(0x1000 + device);
    return take(card, CONTEXT);
}

int cuCtxSetCurrent(void *context) {
    MAY_FAIL;
    current = (int)((uintptr_t)context - 0x1000);
    return current < 0 || current >= CARDS ? INVALID_CONTEXT : SUCCESS;
}

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    MAY_FAIL;
    if (current < 0) return INVALID_CONTEXT;
    *free = look(&cards[current], cards[current].file);
    *total = cards[current].total;
    return SUCCESS;
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    MAY_FAIL;
    if (current < 0) return INVALID_CONTEXT;
    for (int block = 0; block < BLOCKS; block++)
        if (!blocks[block]) {
            uint64_t size = (bytes + PAGE - 1) / PAGE * PAGE + EXTRA;
            int code = take(&cards[current], size);
            if (code) return code;
            blocks[block] = size;
            made++;
            block_card[block] = current;
            *address = (uint64_t)(block + 1) << 32; /* so that a cut address is seen */
            return SUCCESS;
        }
    return OUT_OF_MEMORY;
}

int cuMemFree_v2(uint64_t address) {
    MAY_FAIL;
    int block = (int)(address >> 32) - 1;
    if (block < 0 || block >= BLOCKS || !blocks[block] || block_card[block] != current) return INVALID_VALUE;
    struct card *card = &cards[current];
    card->used -= blocks[block];
    blocks[block] = 0;
    return pwrite(card->file, &card->used, 8, card->slot * 8) == 8 ? SUCCESS : INVALID_VALUE;
}

int cuGetErrorName(int code, const char **name) {
    MAY_FAIL;
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 999 ? "CUDA_ERROR_UNKNOWN" : NULL;
    return *name ? SUCCESS : INVALID_VALUE;
}

/* Not of the driver: what is free of a card, asked by a process without a context. */
uint64_t fake_free_bytes(int card) {
    read_cards();
    int file = open_card(card);
    uint64_t bytes = look(&cards[card], file);
    close(file);
    return bytes;
}

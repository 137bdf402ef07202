/* An interpreter of programs over shared memory: what `program.py` beside it says, in C.

   A program is a flat list of instructions on messages. Python lays it out as rows of 64-bit words
   (`program.py` has the tables, and what each word is), and the memory of the ranks is as in
   `memory.py`, whose numbers come here once, as `layout`. All that outlives a run, such as how far
   a ring has been written, lies in arrays of Python's (`channel.py`), so that a run may begin here,
   and end in Python. The interpreter returns where it cannot go on: to Python's instructions, to a
   message that nobody has asked for, to a wait that takes long.

   Nothing here reads an index or a length out of memory that a peer writes without a look whether
   it is within its table. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

typedef int64_t word;

/* The numbers of memory.py, in the order of `program.LAYOUT`. */
static struct {
    word depth, entry, head, brief, piece, pieces, place, bell, sleeps, state, exchanges, for_room, whom;
} L;
enum { LAYOUT_WORDS = sizeof L / sizeof(word) };

/* The words of a channel, in the order of `channel.Words`. */
enum {
    C_PEER, C_RANK, C_OWN, C_OTHER, C_RING_OUT, C_ACKED, C_RING_IN, C_ACKS, C_PIECES_IN, C_NUM_PIECES,
    C_PID, C_LIFE, C_DIRECT_FROM, C_NEXT_OUT, C_NEXT_IN, C_NUM_RINGS, C_NUM_HELD, C_NUM_EARLY,
    C_UNREAD
};
/* The words of a rank, in the order of `program.RANK`; of its places for pieces (`Pieces`). */
enum { R_OWN, R_BOARD, R_NUMBER, R_SPIN_NS, R_YIELD_NS, R_PROMPT_NS, R_WITHOUT, R_NEXT_WITHOUT, R_FEW, R_MANY,
       R_BY_PYTHON };
enum { P_START, P_NUM, P_READERS, P_ROWS, P_WRITES = 0, P_COUNT, P_FIRST };
/* Kinds of messages in a ring: `channel.py`. */
enum { INLINE, REMOTE, IN_PIECES, MAPPED };

/* An instruction: its kind and six words. */
enum { RECEIVE, SEND, RING, EXCHANGE, WAIT, COPY, COMBINE, PYTHON, CODE_WORDS = 8 };
/* A message: what it is, and how far it is. */
enum {
    M_CHANNEL, M_ADDRESS, M_NBYTES, M_BASE, M_KIND, M_TWIN, M_TAG, M_STATE, M_NUMBER, M_COUNT, M_SOURCE,
    M_BEGIN, M_PIECE, M_STAMP, M_NEXT, MESSAGE_WORDS = 16
};
enum { PLAIN, LENT, OUT, BOARD, BOARD_LENT };                 /* M_KIND */
enum { IDLE, POSTED, DONE, HELD, HELD_REMOTE, WITH_PEER };    /* M_STATE */
/* Why `run` returns: with the number of the instruction above 8 bits. */
enum { END, AT_PYTHON, EARLY, ASLEEP, UNUSUAL, LOST, DAMAGED };
enum { NOTHING = 0, TAKEN = 1, STRANGE = -1, PEER_LOST = -2, BAD = -3 };

enum { BLOCK = 16 << 10, SCRATCH = 256 << 10, LONG = 128 << 10 }; /* bytes */

typedef struct {
    PyObject_HEAD
    PyObject *kept;                /* what the addresses below point to, in arrays that never grow */
    PyObject *queues;              /* a tuple of queues, which are empty unless Python is in between */
    word *code, *messages, *operands, *rank, *places, **channels, *first_in, *first_out, *touched;
    Py_ssize_t num_instructions, num_messages, num_channels;
    word num_posted, tag, at, result, error, peer; /* the peer that is at fault */
    char *scratch;
    PyThreadState *saved;          /* while Python's lock is given up */
} Program;

/* --- memory ------------------------------------------------------------------------------------ */

static inline word load(word address) { return __atomic_load_n((word *)address, __ATOMIC_ACQUIRE); }
static inline void store(word address, word value) { __atomic_store_n((word *)address, value, __ATOMIC_RELEASE); }
static inline void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static word now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (word)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Long work is done without Python's lock, and all that follows it in this run. */
static void unlock(Program *p) { if (!p->saved) p->saved = PyEval_SaveThread(); }

static void move(Program *p, word into, word source, word nbytes) {
    if (nbytes >= LONG) unlock(p);
    if (nbytes == 4) memcpy((void *)into, (void *)source, 4);
    else if (nbytes) memcpy((void *)into, (void *)source, (size_t)nbytes);
}

/* --- sums -------------------------------------------------------------------------------------- */

/* Wider registers are chosen when the program starts. `into` is the left operand, or overlaps none. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(NO_CLONES)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif
typedef void (*Loop)(void *, const void *, const void *, word);
#define LOOP(NAME, TYPE, RESULT)                                                                     \
    WIDE static void NAME(void *into, const void *left, const void *right, word nbytes) {            \
        TYPE *o = into;                                                                              \
        const TYPE *l = left, *r = right;                                                            \
        _Pragma("GCC ivdep") for (word i = 0; i < nbytes / (word)sizeof(TYPE); i++) {                \
            TYPE a = l[i], b = r[i];                                                                 \
            o[i] = (TYPE)(RESULT);                                                                   \
        }                                                                                            \
    }
LOOP(add_f4, float, a + b)
LOOP(add_f8, double, a + b)
LOOP(mul_f4, float, a *b)
LOOP(mul_f8, double, a *b)
#define INTEGERS(BITS)                                                                               \
    LOOP(add_i##BITS, uint##BITS##_t, (uint64_t)a + b)                                               \
    LOOP(mul_i##BITS, uint##BITS##_t, (uint64_t)a * b)                                               \
    LOOP(min_i##BITS, int##BITS##_t, a < b ? a : b)                                                  \
    LOOP(max_i##BITS, int##BITS##_t, a > b ? a : b)
INTEGERS(8)
INTEGERS(16)
INTEGERS(32)
INTEGERS(64)
LOOP(min_u8, uint8_t, a < b ? a : b)
LOOP(max_u8, uint8_t, a > b ? a : b)
LOOP(and_any, uint8_t, a & b)
LOOP(or_any, uint8_t, a | b)
LOOP(xor_any, uint8_t, a ^ b)

/* In the order of `program.OPERATORS`, and of the dtypes in `program.DTYPES`. */
static const Loop loops[7][7] = {
    {add_f4, add_f8, add_i8, add_i8, add_i16, add_i32, add_i64},
    {mul_f4, mul_f8, mul_i8, mul_i8, mul_i16, mul_i32, mul_i64},
    {NULL, NULL, min_u8, min_i8, min_i16, min_i32, min_i64}, /* of floats, torch's have NaNs of their own */
    {NULL, NULL, max_u8, max_i8, max_i16, max_i32, max_i64},
    {NULL, NULL, and_any, and_any, and_any, and_any, and_any},
    {NULL, NULL, or_any, or_any, or_any, or_any, or_any},
    {NULL, NULL, xor_any, xor_any, xor_any, xor_any, xor_any},
};

static void divide(word into, word nbytes, word dtype, word number) {
    if (dtype == 0)
        for (word i = 0; i < nbytes / 4; i++) ((float *)into)[i] /= (float)number;
    else
        for (word i = 0; i < nbytes / 8; i++) ((double *)into)[i] /= (double)number;
}

/* --- to a peer --------------------------------------------------------------------------------- */

static inline word *message(Program *p, word number) { return p->messages + number * MESSAGE_WORDS; }
static inline int is_in(word *m) { return m[M_KIND] == PLAIN || m[M_KIND] == LENT; }

static void wake(word address) { syscall(SYS_futex, address, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

static void ring(word *c) {
    c[C_NUM_RINGS]++;
    word bell = c[C_OTHER] + L.bell * 8;
    store(bell, (c[C_RANK] << 20 | (c[C_NUM_RINGS] & 0xFFFFF)) & 0xFFFFFFFF);
    wake(bell);
}

static int is_taken(word *c, word number) { return load(c[C_ACKED] + 8 * (number & (L.depth - 1))) >= number; }

/* Write a piece to the first free place; whether there was one. */
static int write_piece(Program *p, word *m, word begin, word count) {
    word width = P_FIRST + 2 * p->places[P_READERS];
    for (word place = 0; place < p->places[P_NUM]; place++) {
        word *row = p->places + P_ROWS + place * width, i = 0;
        while (i < row[P_COUNT] && load(row[P_FIRST + 2 * i]) >= row[P_FIRST + 2 * i + 1]) i++;
        if (i < row[P_COUNT]) continue;
        row[P_COUNT] = 0;
        move(p, p->places[P_START] + place * L.piece, m[M_ADDRESS] + begin, count);
        m[M_STAMP] = ++row[P_WRITES], m[M_PIECE] = place, m[M_BEGIN] = begin;
        return 1;
    }
    return 0;
}

/* Write as much of a message as there is room for; whether that is all. */
static int put(Program *p, word *m) {
    word *c = p->channels[m[M_CHANNEL]], nbytes = m[M_NBYTES];
    for (;;) {
        word number = c[C_NEXT_OUT], slot = number & (L.depth - 1), at = c[C_RING_OUT] + slot * L.entry;
        if (load(c[C_ACKED] + 8 * slot) != number - L.depth) return 0;
        word *entry = (word *)at;
        if (nbytes <= L.brief) {
            move(p, at + L.head, m[M_ADDRESS], nbytes);
            entry[1] = nbytes << 2 | INLINE, m[M_STATE] = DONE;
        } else if (c[C_DIRECT_FROM] && nbytes >= c[C_DIRECT_FROM]) {
            entry[1] = nbytes << 2 | REMOTE, entry[2] = m[M_ADDRESS];
            m[M_NUMBER] = number, m[M_STATE] = WITH_PEER;
        } else {
            word free = -1, begin = m[M_COUNT], count = nbytes - begin < L.piece ? nbytes - begin : L.piece;
            for (word i = 0; i < L.pieces; i++)
                if (!c[C_UNREAD + i] || is_taken(c, c[C_UNREAD + i])) free = i;
            if (free < 0) return 0;
            word *twin = message(p, m[M_TWIN]), width = P_FIRST + 2 * p->places[P_READERS];
            word *row = p->places + P_ROWS + twin[M_PIECE] * width;
            int is_there = twin[M_STAMP] && twin[M_BEGIN] == begin && row[P_WRITES] == twin[M_STAMP];
            if (!is_there || row[P_COUNT] == p->places[P_READERS]) {
                if (!write_piece(p, m, begin, count)) return 0;
                twin[M_PIECE] = m[M_PIECE], twin[M_STAMP] = m[M_STAMP], twin[M_BEGIN] = begin;
            }
            row = p->places + P_ROWS + twin[M_PIECE] * width;
            word *reader = row + P_FIRST + 2 * row[P_COUNT]++;
            reader[0] = c[C_ACKED] + 8 * slot, reader[1] = number;
            entry[1] = nbytes << 2 | IN_PIECES, entry[2] = count, entry[4] = twin[M_PIECE];
            c[C_UNREAD + free] = number, m[M_COUNT] += count;
            if (m[M_COUNT] == nbytes) m[M_STATE] = DONE;
        }
        entry[3] = m[M_TAG];
        store(at, number); /* now the message can be seen */
        c[C_NEXT_OUT] = number + 1, p->touched[m[M_CHANNEL]] = 1;
        if (m[M_STATE] != POSTED) return 1;
    }
}

/* Send what waits for room on its way to a peer, in order; whether anything still waits. */
static int flush(Program *p, word channel) {
    word *first = p->first_out + channel;
    for (word m = *first; m >= 0 && m < p->num_posted; m = *first = message(p, m)[M_NEXT])
        if (message(p, m)[M_STATE] == POSTED && !put(p, message(p, m))) return 1;
    return 0;
}

/* Wake the peers that sleep until what was written comes. */
static void tell(Program *p) {
    fence();
    for (Py_ssize_t i = 0; i < p->num_channels; i++) {
        if (!p->touched[i]) continue;
        word *c = p->channels[i], sleeps = load(c[C_OTHER] + L.sleeps * 8), first = p->first_out[i];
        int waits = first >= 0 && first < p->num_posted;
        if (sleeps && (sleeps >> L.whom == c[C_RANK] || waits)) ring(c);
        p->touched[i] = 0;
    }
}

/* --- from a peer ------------------------------------------------------------------------------- */

static void acknowledge(word *c, word number) {
    store(c[C_ACKS] + 8 * (number & (L.depth - 1)), number);
    fence();
    if (load(c[C_OTHER] + L.sleeps * 8) & L.for_room) ring(c);
}

static int read_peer(Program *p, word *c, word source, word into, word nbytes) {
    unlock(p);
    p->peer = c[C_PEER];
    while (nbytes > 0) {
        struct iovec here = {(void *)into, (size_t)nbytes}, there = {(void *)source, (size_t)nbytes};
        ssize_t count = process_vm_readv((pid_t)c[C_PID], &here, 1, &there, 1, 0);
        if (count <= 0) { p->error = errno; return 0; }
        source += count, into += count, nbytes -= count;
    }
    return 1;
}

/* Let go of a message that was read where it lies; whether it has held still so far. */
static int release(Program *p, word *m) {
    word *c = p->channels[m[M_CHANNEL]];
    if (m[M_STATE] == HELD) c[C_NUM_HELD]--;
    else {
        struct pollfd life = {(int)c[C_LIFE], POLLIN, 0};
        p->error = 0, p->peer = c[C_PEER];
        fence(); /* it has held still until it was read */
        if (load(c[C_OTHER] + L.state * 8) != 0 || poll(&life, 1, 0) != 0) return 0;
    }
    m[M_STATE] = DONE;
    acknowledge(c, m[M_NUMBER]);
    return 1;
}

/* Take the message that has come, if there is one, to where it was asked for. */
static int take(Program *p, word channel) {
    word *c = p->channels[channel], number = c[C_NEXT_IN], slot = number & (L.depth - 1);
    word at = c[C_RING_IN] + slot * L.entry;
    if (load(at) != number) return NOTHING;
    word what = load(at + 8), nbytes = what >> 2, kind = what & 3, tag = load(at + 24), *m = NULL;
    for (word i = p->first_in[channel], is_first = 1; i >= 0 && i < p->num_posted; i = message(p, i)[M_NEXT]) {
        word *other = message(p, i);
        if (other[M_STATE] != POSTED) {
            if (is_first) p->first_in[channel] = other[M_NEXT];
            continue;
        }
        is_first = 0;
        if (other[M_TAG] == tag) { m = other; break; }
    }
    p->peer = c[C_PEER];
    if (!m || m[M_NBYTES] != nbytes || kind == MAPPED) return STRANGE;
    if (kind == INLINE) {
        if (nbytes > L.brief) return BAD;
        move(p, m[M_ADDRESS], at + L.head, nbytes);
        m[M_STATE] = DONE;
    } else if (kind == REMOTE) {
        m[M_SOURCE] = load(at + 16), m[M_NUMBER] = number, m[M_STATE] = HELD_REMOTE;
        c[C_NEXT_IN] = number + 1;
        if (m[M_KIND] == LENT) return TAKEN;
        return read_peer(p, c, m[M_SOURCE], m[M_ADDRESS], nbytes) && release(p, m) ? TAKEN : PEER_LOST;
    } else {
        word count = load(at + 16), place = load(at + 32);
        if (place < 0 || place >= c[C_NUM_PIECES] || count <= 0 || count > L.piece || count > nbytes - m[M_COUNT])
            return BAD;
        word source = c[C_PIECES_IN] + place * L.piece;
        if (m[M_KIND] == LENT && count == nbytes && c[C_NUM_HELD] < L.pieces - 1) {
            c[C_NUM_HELD]++, c[C_NEXT_IN] = number + 1;
            m[M_SOURCE] = source, m[M_NUMBER] = number, m[M_STATE] = HELD;
            return TAKEN;
        }
        move(p, m[M_ADDRESS] + m[M_COUNT], source, count);
        m[M_COUNT] += count;
        if (m[M_COUNT] == nbytes) m[M_STATE] = DONE;
    }
    c[C_NEXT_IN] = number + 1;
    acknowledge(c, number);
    return TAKEN;
}

static void look_at_board(Program *p, word *m) {
    word other = p->channels[m[M_CHANNEL]][C_OTHER];
    if (load(other + L.exchanges * 8) < m[M_NUMBER]) return;
    word place = other + p->rank[R_BOARD] + (m[M_NUMBER] & 1) * L.place;
    if (*(word *)place != m[M_TAG]) return; /* of another exchange: ranks disagree, and it never comes */
    m[M_SOURCE] = place + L.head;
    if (m[M_KIND] == BOARD) move(p, m[M_ADDRESS], m[M_SOURCE], m[M_NBYTES]);
    m[M_STATE] = DONE;
}

/* Whether a message has come, or was taken; an error below 0. */
static int look(Program *p, word *m) {
    int found;
    if (m[M_KIND] == BOARD || m[M_KIND] == BOARD_LENT) look_at_board(p, m);
    else if (m[M_KIND] == OUT) {
        if (m[M_STATE] == POSTED) flush(p, m[M_CHANNEL]), tell(p);
        if (m[M_STATE] == WITH_PEER && is_taken(p->channels[m[M_CHANNEL]], m[M_NUMBER])) m[M_STATE] = DONE;
        return m[M_STATE] == DONE;
    } else
        while (m[M_STATE] == POSTED) {
            if ((found = take(p, m[M_CHANNEL])) < 0) return found;
            if (found == NOTHING) break;
        }
    return m[M_STATE] != POSTED;
}

/* Take what has come from all peers, and send what had no place. A message that nobody has asked for
   yet waits in its ring, unless it is in the way of the one that is waited for; or the wait takes
   long, and its sender waits, too. */
static int serve(Program *p, word *m, int is_late) {
    for (Py_ssize_t i = 0; i < p->num_channels; i++) {
        int found;
        while ((found = take(p, i)) == TAKEN) continue;
        int is_in_the_way = is_in(m) && m[M_CHANNEL] == i && m[M_STATE] == POSTED;
        if (is_late) is_in_the_way |= load(p->channels[i][C_OTHER] + L.sleeps * 8) & L.for_room;
        if (found < STRANGE || (found == STRANGE && is_in_the_way)) {
            tell(p);
            return found;
        }
        flush(p, i);
    }
    tell(p);
    return look(p, m);
}

/* Wait for a message for a while: look, and where ranks share cores, give the processor away. Where
   other programs are busy that takes milliseconds, and the next waits do without. */
static int wait_for(Program *p, word *m) {
    int found;
    word *r = p->rank, until = 0;
    for (int i = 1; !(found = look(p, m)); i++) {
        relax();
        if (i & 31) continue;
        if (!until) until = now_ns() + r[R_SPIN_NS];
        else if (now_ns() > until) break;
    }
    if (found || (found = serve(p, m, 0)) || !r[R_YIELD_NS]) return found;
    if (r[R_WITHOUT] > 0) { r[R_WITHOUT]--; return 0; }
    word begin = now_ns(), took = 0;
    unlock(p);
    for (; !found && took < r[R_YIELD_NS]; took = now_ns() - begin) {
        sched_yield();
        found = serve(p, m, 0);
    }
    if (took < r[R_PROMPT_NS]) r[R_NEXT_WITHOUT] = r[R_FEW];
    else {
        r[R_WITHOUT] = r[R_NEXT_WITHOUT];
        r[R_NEXT_WITHOUT] = 2 * r[R_NEXT_WITHOUT] < r[R_MANY] ? 2 * r[R_NEXT_WITHOUT] : r[R_MANY];
    }
    return found;
}

/* --- instructions ------------------------------------------------------------------------------ */

/* COMBINE: into, bytes, operator and dtype, operands and the first of them, divisor. */
static int combine(Program *p, const word *item) {
    word nbytes = item[2], into = item[1], number = item[4];
    Loop loop = loops[item[3] >> 4][item[3] & 15];
    const word *operands = p->operands + item[5];
    word step = BLOCK, is_remote = 0;
    for (word i = 0; i < number; i++)
        is_remote |= operands[i] < 0 && message(p, -1 - operands[i])[M_STATE] == HELD_REMOTE;
    if (is_remote) step = SCRATCH;
    if (nbytes >= LONG) unlock(p);
    for (word start = 0; start < nbytes || start == 0; start += step) {
        word count = nbytes - start < step ? nbytes - start : step, total = 0;
        for (word i = 0; i < number; i++) {
            word source = operands[i] + start;
            if (operands[i] < 0) {
                word *m = message(p, -1 - operands[i]);
                source = (m[M_STATE] == HELD || m[M_KIND] == BOARD_LENT ? m[M_SOURCE] : m[M_ADDRESS]) + start;
                if (m[M_STATE] == HELD_REMOTE) {
                    source = (word)p->scratch + (i == 0 ? 0 : SCRATCH);
                    if (!read_peer(p, p->channels[m[M_CHANNEL]], m[M_SOURCE] + start, source, count)) return 0;
                }
            }
            if (i == 0) total = source;
            else {
                loop((void *)(into + start), (void *)total, (void *)source, count);
                total = into + start;
            }
        }
        if (number == 1 && total != into + start) move(p, into + start, total, count);
        if (item[6]) divide(into + start, count, item[3] & 15, item[6]);
    }
    for (word i = 0; i < number; i++) {
        word *m = operands[i] < 0 ? message(p, -1 - operands[i]) : NULL;
        if (m && (m[M_STATE] == HELD || m[M_STATE] == HELD_REMOTE) && !release(p, m)) return 0;
    }
    return 1;
}

static void begin(Program *p, word number) {
    word *m = message(p, number);
    m[M_TAG] = m[M_BASE] ^ p->tag, m[M_STATE] = POSTED, m[M_COUNT] = m[M_NUMBER] = m[M_STAMP] = 0;
    p->num_posted = number + 1;
}

/* EXCHANGE: first message, how many, source, bytes, tag. */
static void exchange(Program *p, const word *item) {
    word *r = p->rank, number = ++r[R_NUMBER], place = r[R_OWN] + r[R_BOARD] + (number & 1) * L.place;
    move(p, place + L.head, item[3], item[4]);
    *(word *)place = item[5] ^ p->tag;
    for (word i = item[1]; i < item[1] + item[2]; i++) begin(p, i), message(p, i)[M_NUMBER] = number;
    store(r[R_OWN] + L.exchanges * 8, number);
    fence();
    for (word i = item[1]; i < item[1] + item[2]; i++) {
        word *c = p->channels[message(p, i)[M_CHANNEL]];
        word sleeps = load(c[C_OTHER] + L.sleeps * 8);
        if (sleeps && sleeps >> L.whom == c[C_RANK]) ring(c);
    }
    p->num_posted += item[2]; /* as many sends, which are over */
}

static word run_from(Program *p, word at) {
    for (; at < p->num_instructions; at++) {
        const word *item = p->code + at * CODE_WORDS;
        int found = 1;
        switch (item[0]) {
        case RECEIVE: /* Python may have taken it for an earlier program */
            begin(p, item[1]);
            if (p->channels[message(p, item[1])[M_CHANNEL]][C_NUM_EARLY]) return at << 8 | EARLY;
            break;
        case SEND:
            begin(p, item[1]);
            flush(p, message(p, item[1])[M_CHANNEL]);
            break;
        case RING: tell(p); break;
        case EXCHANGE: exchange(p, item); break;
        case WAIT: found = message(p, item[1])[M_STATE] != DONE ? wait_for(p, message(p, item[1])) : 1; break;
        case COPY: move(p, item[1], item[2], item[3]); break;
        case COMBINE: found = combine(p, item) ? 1 : PEER_LOST; break;
        default: return at << 8 | AT_PYTHON;
        }
        if (found == 1) continue;
        return at << 8 | (found == 0 ? ASLEEP : found == STRANGE ? UNUSUAL : found == PEER_LOST ? LOST : DAMAGED);
    }
    return at << 8 | END;
}

/* --- for Python -------------------------------------------------------------------------------- */

static int lock(Program *p) {
    if (p->saved) PyEval_RestoreThread(p->saved), p->saved = NULL;
    return 1;
}

static word run_on(Program *p) {
    p->result = run_from(p, p->at);
    lock(p);
    p->at = (p->result >> 8) + ((p->result & 255) == AT_PYTHON || (p->result & 255) == EARLY);
    return p->result;
}

static word run_with(Program *p, word tag) {
    p->tag = tag, p->num_posted = p->at = 0;
    if (p->kept && p->rank[R_BY_PYTHON]) { /* Python may have left messages in its queues */
        for (Py_ssize_t i = 0; i < PyTuple_Size(p->queues); i++)
            if (PyObject_Size(PyTuple_GetItem(p->queues, i))) return p->result = UNUSUAL;
        p->rank[R_BY_PYTHON] = 0;
    }
    for (Py_ssize_t i = 0; i < 2 * p->num_channels; i++) p->first_in[i] = p->first_in[i + 2 * p->num_channels];
    return run_on(p);
}

/* run(tag): from the start; run(): go on behind the instruction at which it has returned, or, of one
   that waits, at it. */
static PyObject *run(Program *p, PyObject *args) {
    long long tag = -1;
    if (!PyArg_ParseTuple(args, "|L", &tag)) return NULL;
    return PyLong_FromLongLong(tag >= 0 ? run_with(p, tag) : run_on(p));
}

/* look(is_late): whether the message that is waited for is here, and serve all peers; or why it cannot be. */
static PyObject *look_again(Program *p, PyObject *is_late) {
    int found = serve(p, message(p, p->code[p->at * CODE_WORDS + 1]), PyObject_IsTrue(is_late));
    lock(p);
    return PyLong_FromLong(found);
}

static PyObject *facts(Program *p, void *Py_UNUSED(which)) {
    int waits = 0; /* whether a message waits for room, or until it is read */
    for (Py_ssize_t i = 0; i < p->num_channels; i++) {
        word first = p->first_out[i];
        waits |= first >= 0 && first < p->num_posted;
    }
    const word *item = p->code + p->at * CODE_WORDS;
    if (p->at < p->num_instructions && item[0] == WAIT) waits |= message(p, item[1])[M_KIND] == OUT;
    return Py_BuildValue("(LLLiLL)", (long long)p->num_posted, (long long)p->error, (long long)p->peer, waits,
                         (long long)p->result, (long long)p->tag);
}

static int traverse_program(Program *p, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)p));
    Py_VISIT(p->kept);
    Py_VISIT(p->queues);
    return 0;
}

static int clear_program(Program *p) {
    p->num_instructions = p->num_channels = 0; /* nothing can be run any more */
    Py_CLEAR(p->kept);
    Py_CLEAR(p->queues);
    return 0;
}

static void dealloc(Program *p) {
    PyTypeObject *type = Py_TYPE((PyObject *)p);
    PyObject_GC_UnTrack(p);
    free(p->channels), free(p->first_in), free(p->touched), free(p->scratch);
    Py_XDECREF(p->kept), Py_XDECREF(p->queues);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(p);
    Py_DECREF(type);
}

static PyTypeObject *program_type;

/* Program((code, messages, operands, rank, places), (channel, ...), instructions, messages, queues, kept): arrays by
   their addresses, and how many instructions and messages there are. */
static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(names)) {
    PyObject *channels, *queues, *kept;
    long long code, messages, operands, rank, places, num_instructions, num_messages;
    if (!PyArg_ParseTuple(args, "(LLLLL)O!LLO!O", &code, &messages, &operands, &rank, &places, &PyTuple_Type, &channels,
                          &num_instructions, &num_messages, &PyTuple_Type, &queues, &kept))
        return NULL;
    Program *p = (Program *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!p) return NULL;
    Py_INCREF(kept), Py_INCREF(queues);
    p->kept = kept, p->queues = queues, p->code = (word *)code, p->messages = (word *)messages;
    p->operands = (word *)operands, p->rank = (word *)rank, p->places = (word *)places;
    p->num_instructions = num_instructions, p->num_messages = num_messages, p->num_channels = PyTuple_Size(channels);
    size_t n = (size_t)p->num_channels + 1;
    p->channels = calloc(n, sizeof(word *)), p->touched = calloc(n, sizeof(word));
    p->first_in = calloc(4 * n, sizeof(word)), p->first_out = p->first_in + p->num_channels;
    p->scratch = malloc(2 * SCRATCH); /* which takes no memory until it is used */
    if (!p->channels || !p->first_in || !p->touched || !p->scratch) PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < p->num_channels && !PyErr_Occurred(); i++)
        p->channels[i] = (word *)PyLong_AsLongLong(PyTuple_GetItem(channels, i));
    if (PyErr_Occurred()) {
        Py_DECREF(p);
        return NULL;
    }
    /* Chains of the messages from and to each peer, and their first ones, behind those of a run. */
    word *first = p->first_in + 2 * p->num_channels;
    for (Py_ssize_t i = 0; i < 2 * p->num_channels; i++) first[i] = -1;
    for (word i = p->num_messages - 1; i >= 0; i--) {
        word *m = message(p, i);
        if (m[M_KIND] == BOARD || m[M_KIND] == BOARD_LENT || m[M_CHANNEL] < 0) continue;
        word *chain = first + m[M_CHANNEL] + (m[M_KIND] == OUT ? p->num_channels : 0);
        m[M_NEXT] = *chain, *chain = i;
    }
    return (PyObject *)p;
}

/* --- a whole call --------------------------------------------------------------------------- */

/* The words of a group: communicator.py. */
enum { G_READY, G_ISSUED, G_HISTORY, G_SENT, G_TAKEN };
enum { TAGS = 0x7FFFFFFF };

/* A call of an operation that is bound to a program, as `Communicator.run` makes it where nothing
   is unusual: it takes its turn and its number, and runs. */
typedef struct {
    PyObject_HEAD
    PyObject *program, *objects; /* a tuple of what is named below, and the arrays of `group` and `valid` */
    word *group, *valid, signature, nbytes_sent, spread;
} Quick;
enum { Q_SERVE, Q_END_SERVING, Q_ITEMS, Q_OBSERVERS, Q_PROFILER, Q_PROFILER_NAME, Q_PROGRESS, Q_LAST, Q_BEGIN_RUN,
       Q_OPERATION, Q_ADDRESSES, Q_NOW, Q_NOTHING, Q_GROUP, Q_VALID, NUM_OBJECTS };

static PyObject *part(Quick *q, int which) { return PyTuple_GetItem(q->objects, which); }

static int is_true(PyObject *answer) {
    int result = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return result;
}

static int done(PyObject *answer) {
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* Whether the functions give the addresses of the program's tensors; -1 with an error. */
static int is_in_place(Quick *q, PyObject *functions) {
    PyObject *addresses = part(q, Q_ADDRESSES);
    Py_ssize_t count = PyTuple_Size(addresses);
    if (PyTuple_Size(functions) != count) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *address = PyObject_CallNoArgs(PyTuple_GetItem(functions, i));
        if (!address) return -1;
        int is_same = PyLong_AsLongLong(address) == PyLong_AsLongLong(PyTuple_GetItem(addresses, i));
        Py_DECREF(address);
        if (!is_same) return 0;
    }
    return 1;
}

/* Note the call as the last one, and as the first of a run, if the one before was another; see `Progress`. */
static int note(Quick *q, word number) {
    PyObject *progress = part(q, Q_PROGRESS), *name = part(q, Q_LAST), *operation = part(q, Q_OPERATION);
    PyObject *before = PyObject_GetAttr(progress, name), *index = PyLong_FromLongLong(number), *last = NULL;
    int result = -1;
    if (before && index && (last = PyTuple_Pack(2, index, operation)) &&
        PyObject_SetAttr(progress, name, last) == 0) {
        int goes_on = PyTuple_GetItem(before, 1) == operation &&
                      PyLong_AsLongLong(PyTuple_GetItem(before, 0)) + 1 == number;
        result = goes_on ? 0 : done(PyObject_CallFunctionObjArgs(part(q, Q_BEGIN_RUN), before, NULL));
    }
    Py_XDECREF(before), Py_XDECREF(index), Py_XDECREF(last);
    return result;
}

/* quick(functions): None if the call is over, -1 if it has not begun, else its number: Python goes on,
   and serves. The functions give the addresses of the tensors; None if these are in their places. While
   this runs, Python's lock is held, so that no other thread takes a turn, until `serving` is taken. */
static PyObject *call(Quick *q, PyObject *args, PyObject *Py_UNUSED(names)) {
    PyObject *functions;
    int answer;
    if (!PyArg_UnpackTuple(args, "quick", 1, 1, &functions)) return NULL;
    if (!q->objects || !q->group[G_READY] || q->group[G_TAKEN] || !q->valid[0] || PyObject_Size(part(q, Q_ITEMS)) || PyObject_Size(part(q, Q_OBSERVERS)))
        return PyLong_FromLong(-1);
    if ((answer = is_true(PyObject_GetAttr(part(q, Q_PROFILER), part(q, Q_PROFILER_NAME)))) < 0) return NULL;
    if (answer || (functions != Py_None && (answer = is_in_place(q, functions)) != 1)) {
        if (answer < 0) PyErr_Clear(); /* Python finds the same, and says it */
        return PyLong_FromLong(-1);
    }
    PyObject *now = part(q, Q_NOW), *nothing = part(q, Q_NOTHING);
    if ((answer = is_true(PyObject_Call(part(q, Q_SERVE), now, NULL))) < 0) return NULL;
    if (!answer) return PyLong_FromLong(-1);
    word number = q->group[G_ISSUED]++;
    q->group[G_TAKEN] = 1;
    if (note(q, number) < 0) return NULL;
    q->group[G_HISTORY] = (word)(((uint64_t)q->group[G_HISTORY] + (uint64_t)q->signature) * (uint64_t)q->spread & TAGS);
    word result = run_with((Program *)q->program, (q->group[G_HISTORY] ^ number) & TAGS);
    if (result & 255) return PyLong_FromLongLong(number);
    q->group[G_SENT] += q->nbytes_sent, q->group[G_TAKEN] = 0, q->valid[1]++;
    if (done(PyObject_Call(part(q, Q_END_SERVING), nothing, NULL)) < 0) return NULL;
    Py_RETURN_NONE;
}

static int traverse(Quick *q, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)q));
    Py_VISIT(q->program);
    Py_VISIT(q->objects);
    return 0;
}

static int clear(Quick *q) {
    Py_CLEAR(q->program);
    Py_CLEAR(q->objects);
    return 0;
}

static void dealloc_quick(Quick *q) {
    PyTypeObject *type = Py_TYPE((PyObject *)q);
    PyObject_GC_UnTrack(q);
    Py_XDECREF(q->program), Py_XDECREF(q->objects);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(q);
    Py_DECREF(type);
}

/* Quick(program, group, valid, signature, nbytes_sent, spread, objects); the arrays by their addresses */
static PyObject *make_quick(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(names)) {
    PyObject *program, *objects;
    long long group, valid, signature, nbytes_sent, spread;
    if (!PyArg_ParseTuple(args, "O!LLLLLO!", program_type, &program, &group, &valid, &signature, &nbytes_sent, &spread,
                          &PyTuple_Type, &objects))
        return NULL;
    if (PyTuple_Size(objects) != NUM_OBJECTS) {
        PyErr_SetString(PyExc_ValueError, "not the objects of a call");
        return NULL;
    }
    Quick *q = (Quick *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!q) return NULL;
    Py_INCREF(program), Py_INCREF(objects);
    q->program = program, q->objects = objects, q->group = (word *)group, q->valid = (word *)valid;
    q->signature = signature, q->nbytes_sent = nbytes_sent, q->spread = spread;
    return (PyObject *)q;
}

static PyObject *set_layout(PyObject *Py_UNUSED(module), PyObject *numbers) {
    if (!PyTuple_Check(numbers) || PyTuple_Size(numbers) != LAYOUT_WORDS) {
        PyErr_SetString(PyExc_ValueError, "not the layout of this program");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < LAYOUT_WORDS; i++) {
        ((word *)&L)[i] = PyLong_AsLongLong(PyTuple_GetItem(numbers, i));
        if (PyErr_Occurred()) return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_VARARGS, "Run from the start, or go on."},
    {"look", (PyCFunction)(void (*)(void))look_again, METH_O, "Serve all peers; what has come of the wait."},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef getters[] = {
    {"facts", (getter)(void (*)(void))facts, NULL, "Messages begun, last error and its peer, whether sends wait, why it has returned, tag.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_traverse, (void *)traverse_program}, {Py_tp_clear, (void *)clear_program},
    {Py_tp_new, (void *)make}, {Py_tp_dealloc, (void *)dealloc}, {Py_tp_methods, methods}, {Py_tp_getset, getters},
    {0, NULL}};
static PyType_Spec spec = {"ringcoll.runtime.transport.shared._program.Program", sizeof(Program), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
static PyType_Slot quick_slots[] = {
    {Py_tp_new, (void *)make_quick}, {Py_tp_dealloc, (void *)dealloc_quick}, {Py_tp_call, (void *)call},
    {Py_tp_traverse, (void *)traverse}, {Py_tp_clear, (void *)clear}, {0, NULL}};
static PyType_Spec quick_spec = {"ringcoll.runtime.transport.shared._program.Quick", sizeof(Quick), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, quick_slots};
static PyMethodDef functions[] = {
    {"layout", set_layout, METH_O, "Take the numbers of memory.py."}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_program", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__program(void) {
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&spec);
    PyObject *quick = PyType_FromSpec(&quick_spec);
    program_type = (PyTypeObject *)type;
    Py_XINCREF(type); /* it is asked for as long as the process lives */
    if (!module || !type || !quick || PyModule_AddObject(module, "Program", type) < 0 ||
        PyModule_AddObject(module, "Quick", quick) < 0 || PyModule_AddIntConstant(module, "SOURCE", SOURCE) < 0)
        return NULL;
    return module;
}

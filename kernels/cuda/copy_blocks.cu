// Copies blocks of an engine's paged cache to slots and back, as opaque bytes: all of them in one
// launch. Slots are in the host's memory, mapped for the device. Compiled when an engine starts
// (without headers), and for the host by the tests. The threads do not communicate.

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

// A run of bytes of each block: at `start` in its slot, and at base + id * stride on the device.
struct Piece {
    u64 base;
    u64 stride;
    u64 start;
    u64 bytes;
};

template <typename Word>
__device__ void move_words(u64 to, u64 from, u64 bytes) {
    Word* const out = reinterpret_cast<Word*>(to);
    const Word* const in = reinterpret_cast<const Word*>(from);
    const u64 words = bytes / sizeof(Word), step = blockDim.x;
    // Four words in flight at a time, also of a short run, because the path to the host is slow.
    for (u64 at = threadIdx.x; at < words; at += 4 * step) {
        Word held[4];
        for (u32 n = 0; n < 4; ++n) {
            if (at + n * step < words) held[n] = in[at + n * step];
        }
        for (u32 n = 0; n < 4; ++n) {
            if (at + n * step < words) out[at + n * step] = held[n];
        }
    }
}

__device__ void move_bytes(u64 to, u64 from, u64 bytes) {
    const u64 mixed = to | from | bytes;
    if (mixed % 16 == 0) {
        move_words<uint4>(to, from, bytes);
    } else if (mixed % 8 == 0) {
        move_words<u64>(to, from, bytes);
    } else if (mixed % 4 == 0) {
        move_words<u32>(to, from, bytes);
    } else {
        move_words<u8>(to, from, bytes);
    }
}

// Block i is page ids[i] and the slot at slots[i]. Works with every grid size: a thread block
// copies a piece, and then the one a grid size further on.
extern "C" __global__ void __launch_bounds__(256)
    kvtier_copy_blocks(const Piece* pieces, u32 piece_count, const u64* slots, const u32* ids,
                       u32 block_count, u32 inwards) {
    const u64 units = static_cast<u64>(block_count) * piece_count;
    for (u64 unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const Piece piece = pieces[unit % piece_count];
        const u64 block = unit / piece_count;
        const u64 page = piece.base + ids[block] * piece.stride;
        const u64 slot = slots[block] + piece.start;
        move_bytes(inwards != 0 ? slot : page, inwards != 0 ? page : slot, piece.bytes);
    }
}

// Reads frames in pieces from a disk that returns fewer bytes than requested, in any order: each
// read ends once, with all available bytes or with the error. `fuzz_reads ROUNDS SEED` prints how
// many reads failed. `fuzz_reads writes`: writes frames in two calls, for each pair of results of
// the calls.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "disk.h"

using namespace kvtier;

namespace {

constexpr uint64_t kSector = 512;

class Fuzz {
 public:
    explicit Fuzz(uint64_t seed) : chance_(seed) {}

    void round() {
        PagePool again(uint64_t{64} << 20);
        Operation read;
        read.kind = Kind::kRead;
        read.encoded = read.staged = true;
        read.needed = 1 + below(below(4) == 0 ? 9 << 20 : 3 << 20);
        read.total = whole_pages(read.needed);
        if (!read.begin(again)) fail("has no memory");
        std::vector<uint8_t> file(read.total);
        for (size_t i = 0; i < file.size(); i += 64) file[i] = static_cast<uint8_t>(chance_());
        const bool is_short = below(6) == 0;
        if (is_short) file.resize(below(file.size()));
        const bool whole = file.size() >= read.needed;
        const size_t troubles = below(3) == 0 ? 2 + below(6) : 1000000;
        int broken = 0;
        bool over = false;
        while (!over) {
            if (read.in_pieces) {
                while (const auto which = read.next_piece()) {
                    calls_.push_back({*which, read.requested, read.pieces[*which].nbytes});
                    read.requested += read.pieces[*which].nbytes;
                    read.calls++;
                }
            } else {
                if (read.calls != 0) fail("is read twice at a time");
                const int parts = read.rest(uint64_t{1} << 30);
                if (parts != 1) fail("has other parts");
                const auto* const at = static_cast<uint8_t*>(read.parts[0].iov_base);
                const auto from = static_cast<uint64_t>(at - read.own.data());
                calls_.push_back({2, from, read.parts[0].iov_len});
            }
            if (calls_.empty() || calls_.size() > 2) fail("waits for nothing, or for too much");
            const size_t number = below(calls_.size());
            const Call call = calls_[number];
            calls_.erase(calls_.begin() + static_cast<ptrdiff_t>(number));
            if (call.at % kPage != 0 || call.at + call.nbytes > read.total)
                fail("is read elsewhere");
            int64_t call_result;
            if (below(troubles) == 0) {
                constexpr int kErrors[] = {EAGAIN, EINTR, EAGAIN, EIO};
                call_result = -kErrors[below(4)];
                if (call_result == -EIO) broken = EIO;
            } else {
                uint64_t some = call.nbytes;
                if (below(troubles) == 0) some = (1 + below(some / kSector)) * kSector;
                const uint64_t there = call.at < file.size() ? file.size() - call.at : 0;
                some = std::min(some, there);
                if (some != 0) std::memcpy(read.own.data() + call.at, &file[call.at], some);
                call_result = static_cast<int64_t>(some);
            }
            over = call.which < 2 ? read.advance_piece(call.which, call_result)
                                  : read.advance(call_result);
            if (std::min(read.from(), read.needed) > file.size()) fail("says that more has come");
            const size_t arrived = std::min<size_t>(read.from(), file.size());
            if (std::memcmp(read.own.data(), file.data(), arrived) != 0) fail("is not what came");
        }
        if (!calls_.empty()) fail("ends while something is under way");
        if (read.error == 0) {
            if (!whole || std::memcmp(read.own.data(), file.data(), read.needed) != 0) {
                fail("ends as something else");
            }
        } else if (read.error != broken && (whole || read.error != ENODATA)) {
            fail("has failed for nothing");
        }
        failed += read.error != 0;
        damaged++;
    }

    size_t damaged = 0, failed = 0;

 private:
    struct Call {
        size_t which;  // of the two pieces; 2 for a read in one piece
        uint64_t at, nbytes;
    };

    size_t below(size_t end) { return chance_() % end; }

    [[noreturn]] void fail(const char* what) {
        std::fprintf(stderr, "a frame %s\n", what);
        std::abort();
    }

    std::mt19937_64 chance_;
    std::vector<Call> calls_;
};

// Writes a header and a payload by one call each, which return `header_result` and `call_result`;
// writes the rest with at most `most` bytes per call. Checks the file, and returns the error.
int write_in_two(int64_t header_result, int64_t call_result, uint64_t most) {
    constexpr uint64_t kHeader = kPage, kPayload = 2 * kPage;
    Operation write;
    write.kind = Kind::kWrite;
    write.own = Pages(kHeader);
    write.header_bytes = kHeader;
    write.nbytes = kPayload;
    write.total = kHeader + kPayload;
    std::vector<uint8_t> source(write.total), file(write.total);
    for (size_t i = 0; i < source.size(); i++) source[i] = static_cast<uint8_t>(1 + i % 251);
    std::memcpy(write.own.data(), source.data(), kHeader);
    write.payload = &source[kHeader];
    const auto put = [&](uint64_t at, const void* from, int64_t nbytes) {
        if (nbytes > 0) std::memcpy(&file[at], from, static_cast<size_t>(nbytes));
    };
    put(0, write.own.data(), header_result);
    put(kHeader, write.payload, call_result);
    write.header_result = header_result;
    write.call_result = call_result;
    bool over = write.advance(write.combined_result());
    while (!over) {
        const int parts = write.rest(most);
        uint64_t at = write.from(), moved = 0;
        for (int i = 0; i < parts; i++) {
            put(at + moved, write.parts[i].iov_base, static_cast<int64_t>(write.parts[i].iov_len));
            moved += write.parts[i].iov_len;
        }
        over = write.advance(static_cast<int64_t>(moved));
    }
    if (write.error == 0 && file != source) {
        std::fprintf(stderr, "another file after %lld and %lld bytes\n",
                     static_cast<long long>(header_result), static_cast<long long>(call_result));
        std::abort();
    }
    return write.error;
}

void write_all_pairs() {
    std::vector<int64_t> header{-EIO}, payload{-EIO};
    for (uint64_t at = 0; at <= kPage; at += kSector) header.push_back(static_cast<int64_t>(at));
    for (uint64_t at = 0; at <= 2 * kPage; at += kSector) {
        payload.push_back(static_cast<int64_t>(at));
    }
    size_t pairs = 0;
    for (const int64_t first : header) {
        for (const int64_t second : payload) {
            for (const uint64_t most : {kPage, 3 * kPage}) {
                // The write may continue or fail if nothing of the header was written.
                const int error = write_in_two(first, second, most);
                const bool fails = first < 0 || second < 0;
                if (fails ? error != EIO : first != 0 && error != 0) {
                    std::fprintf(stderr, "error %d after %lld and %lld bytes\n", error,
                                 static_cast<long long>(first), static_cast<long long>(second));
                    std::abort();
                }
                pairs++;
            }
        }
    }
    std::printf("%zu pairs\n", pairs);
}

}  // namespace

int main(int count, char** arguments) {
    if (count == 2 && std::strcmp(arguments[1], "writes") == 0) {
        write_all_pairs();
        return 0;
    }
    if (count != 3) return 2;
    const size_t wanted = std::strtoull(arguments[1], nullptr, 10) / 60;
    Fuzz fuzz(std::strtoull(arguments[2], nullptr, 10));
    while (fuzz.damaged < wanted) fuzz.round();
    std::printf("%zu read, %zu failed\n", fuzz.damaged, fuzz.failed);
}

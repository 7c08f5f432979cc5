// Frames read in pieces from a disk that returns less than it was asked for, in any order: each
// read ends once, with all that there is or with the error. `fuzz_reads ROUNDS SEED`; says how many
// failed.
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
        PagesAgain again(uint64_t{64} << 20);
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
                    calls_.push_back({*which, read.asked, read.pieces[*which].nbytes});
                    read.asked += read.pieces[*which].nbytes;
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
            int64_t said;
            if (below(troubles) == 0) {
                constexpr int kErrors[] = {EAGAIN, EINTR, EAGAIN, EIO};
                said = -kErrors[below(4)];
                if (said == -EIO) broken = EIO;
            } else {
                uint64_t some = call.nbytes;
                if (below(troubles) == 0) some = (1 + below(some / kSector)) * kSector;
                const uint64_t there = call.at < file.size() ? file.size() - call.at : 0;
                some = std::min(some, there);
                if (some != 0) std::memcpy(read.own.data() + call.at, &file[call.at], some);
                said = static_cast<int64_t>(some);
            }
            over = call.which < 2 ? read.advance_piece(call.which, said) : read.advance(said);
            if (std::min(read.from(), read.needed) > file.size()) fail("says that more has come");
            const size_t come = std::min<size_t>(read.from(), file.size());
            if (std::memcmp(read.own.data(), file.data(), come) != 0) fail("is not what came");
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
        size_t which;  // of the two pieces; 2 where it is read as one
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

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) return 2;
    const size_t wanted = std::strtoull(arguments[1], nullptr, 10) / 60;
    Fuzz fuzz(std::strtoull(arguments[2], nullptr, 10));
    while (fuzz.damaged < wanted) fuzz.round();
    std::printf("%zu read, %zu failed\n", fuzz.damaged, fuzz.failed);
}

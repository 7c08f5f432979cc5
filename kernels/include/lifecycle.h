// The states of a block as a table. The place of a READY block is not part of its state: `tier` in
// its record is the number of the highest tier that has it.
#pragma once
#include <array>
#include <cstdint>

namespace kvtier {

enum class State : std::uint8_t {
    absent,       // no block
    writing,      // has a slot and one writer; not matched
    ready,        // in memory: matched, leased, evicted; in a tier below: matched, promoted
    doomed,       // forgotten while leased: not matched, kept until the last lease ends
    quarantined,  // its writer may be dead but still copying, or it was forgotten during a read
    promoting,    // has a slot that a read from a tier below fills
    unused = 7    // no record
};
enum class Event : std::uint8_t {
    reserve,
    commit,
    abort,
    quarantine,
    gone,
    regain,
    evict,
    evict_framed,
    forget,
    forget_leased,
    forget_promoting,
    last_unlease,
    restore,
    promote,
    promoted,
    unpromoted,
    spoilt,
    lost
};

inline constexpr std::array state_names{"absent", "writing",     "ready",
                                        "doomed", "quarantined", "promoting"};

struct Transition {
    State from;
    Event event;
    State to;
};

// `evict_framed` moves a block from memory to the tier of its frame. `lost` is the loss of the
// frame of a block that is only there. `forget_promoting` keeps the slot until the read ends,
// because a read cannot be cancelled.
inline constexpr std::array transitions{
    Transition{State::absent, Event::reserve, State::writing},
    Transition{State::writing, Event::commit, State::ready},
    Transition{State::writing, Event::abort, State::absent},
    Transition{State::writing, Event::quarantine, State::quarantined},
    Transition{State::quarantined, Event::gone, State::absent},
    Transition{State::quarantined, Event::regain, State::writing},
    Transition{State::ready, Event::evict, State::absent},
    Transition{State::ready, Event::evict_framed, State::ready},
    Transition{State::ready, Event::forget, State::absent},
    Transition{State::ready, Event::forget_leased, State::doomed},
    Transition{State::doomed, Event::last_unlease, State::absent},
    Transition{State::absent, Event::restore, State::ready},
    Transition{State::ready, Event::promote, State::promoting},
    Transition{State::ready, Event::lost, State::absent},
    Transition{State::promoting, Event::promoted, State::ready},
    Transition{State::promoting, Event::unpromoted, State::ready},
    Transition{State::promoting, Event::spoilt, State::absent},
    Transition{State::promoting, Event::forget_promoting, State::quarantined},
};

// True if a prefix can be restored from it, wherever it is.
constexpr bool restorable(State state) {
    return state == State::ready || state == State::promoting;
}

// The only state in which an event is allowed.
constexpr State before(Event event) {
    for (const Transition& t : transitions)
        if (t.event == event) return t.from;
    return State::unused;
}

constexpr State after(Event event) {
    for (const Transition& t : transitions)
        if (t.event == event) return t.to;
    return State::unused;
}

}  // namespace kvtier

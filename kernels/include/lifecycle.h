// The states of a block as a table. models/lifecycle.py contains the same table, and a test
// compares them.
#pragma once
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvtier {

enum class State : std::uint8_t {
    absent,
    writing,
    ready,
    doomed,
    quarantined,
    cold,
    promoting,
    unused = 7
};
enum class Event : std::uint8_t {
    reserve,
    commit,
    abort,
    quarantine,
    gone,
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

inline constexpr std::array state_names{"absent",      "writing", "ready",    "doomed",
                                        "quarantined", "cold",    "promoting"};
inline constexpr std::array event_names{
    "reserve",      "commit",   "abort",         "quarantine",       "gone",         "evict",
    "evict_framed", "forget",   "forget_leased", "forget_promoting", "last_unlease", "restore",
    "promote",      "promoted", "unpromoted",    "spoilt",           "lost"};

struct Transition {
    State from;
    Event event;
    State to;
};

inline constexpr std::array transitions{
    Transition{State::absent, Event::reserve, State::writing},
    Transition{State::writing, Event::commit, State::ready},
    Transition{State::writing, Event::abort, State::absent},
    Transition{State::writing, Event::quarantine, State::quarantined},
    Transition{State::quarantined, Event::gone, State::absent},
    Transition{State::ready, Event::evict, State::absent},
    Transition{State::ready, Event::evict_framed, State::cold},
    Transition{State::ready, Event::forget, State::absent},
    Transition{State::ready, Event::forget_leased, State::doomed},
    Transition{State::doomed, Event::last_unlease, State::absent},
    Transition{State::absent, Event::restore, State::cold},
    Transition{State::cold, Event::promote, State::promoting},
    Transition{State::cold, Event::lost, State::absent},
    Transition{State::promoting, Event::promoted, State::ready},
    Transition{State::promoting, Event::unpromoted, State::cold},
    Transition{State::promoting, Event::spoilt, State::absent},
    Transition{State::promoting, Event::forget_promoting, State::quarantined},
};

// True if a prefix can be restored from it: in memory, on disk, or being read.
constexpr bool restorable(State state) {
    return state == State::ready || state == State::cold || state == State::promoting;
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

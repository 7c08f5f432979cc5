// A block's states as a table; kvtier/lifecycle.py holds the same one and a test compares them.
#pragma once
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvtier {

enum class State : std::uint8_t { absent, writing, ready, doomed, quarantined, unused = 7 };
enum class Event : std::uint8_t {
    reserve,
    commit,
    abort,
    quarantine,
    gone,
    evict,
    forget,
    forget_leased,
    last_unlease
};

inline constexpr std::array state_names{"absent", "writing", "ready", "doomed", "quarantined"};
inline constexpr std::array event_names{"reserve", "commit", "abort",         "quarantine",  "gone",
                                        "evict",   "forget", "forget_leased", "last_unlease"};

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
    Transition{State::ready, Event::forget, State::absent},
    Transition{State::ready, Event::forget_leased, State::doomed},
    Transition{State::doomed, Event::last_unlease, State::absent},
};

// The one state that an event may start from.
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

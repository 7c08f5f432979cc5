// Blocks in chains, and which of them may be evicted.
#include "chains.h"

#include <algorithm>
#include <queue>
#include <unordered_map>

namespace kvtier {

Chains::Chains(List lists) : nonempty_(lists / 64 + 1), made_(lists) {
    for (List list = 0; list < lists; ++list) {
        links_.reach(list);
        links_[list] = {list, list, none};
    }
}

// ---- lists ----

void Chains::insert(Id id, List list, bool hot) {
    std::uint32_t link = spare_;
    if (link != 0) {
        spare_ = links_[link].next;
    } else {
        link = made_++;
        links_.reach(link);
    }
    const std::uint32_t next = hot ? list : links_[list].next, prev = links_[next].prev;
    links_[link] = {prev, next, id};
    nonempty_[list / 64] |= std::uint64_t{1} << list % 64;
    links_[prev].next = links_[next].prev = link;
    nodes_[id].below = link;
    states_[id].listed = 1;
    ++listed_;
}

void Chains::unlist(Id id) {
    const std::uint32_t link = nodes_[id].below;
    links_[links_[link].prev].next = links_[link].next;
    links_[links_[link].next].prev = links_[link].prev;
    links_[link].next = spare_;
    spare_ = link;
    nodes_[id].below = 0;
    states_[id].listed = 0;
    --listed_;
}

void Chains::list(Id id, bool hot) {
    if (is_evictable(id) && nodes_[id].below == 0)
        insert(id, states_[id].demoted ? demoted_list : list_of(id), hot);
}

void Chains::relist(Id id) {
    if (states_[id].listed) unlist(id);
    // Most blocks have followers.
    if (nodes_[id].below == 0) list(id, true);
}

void Chains::splice(List from, List to) {
    if (empty(from)) return;
    const std::uint32_t first = links_[from].next, last = links_[from].prev;
    const std::uint32_t next = links_[to].next;
    links_[first].prev = to;
    links_[to].next = first;
    links_[last].next = next;
    links_[next].prev = last;
    links_[from].prev = links_[from].next = from;
    nonempty_[to / 64] |= std::uint64_t{1} << to % 64;
}

// ---- events ----

void Chains::added(std::span<const Id> ids, std::span<const Name> names,
                   std::span<const Id> parents) {
    check_ids(ids);
    on_batch(ids.size());
    for (std::size_t i = ids.size(); i-- > 0;) {
        const Id id = ids[i];
        nodes_.reach(id);
        states_.reach(id);
        limit_ = std::max(limit_, id + 1);
        BlockState& one = states_[id];
        const bool again = one.where == away;
        const bool last = i + 1 == ids.size();
        one.stamp = tick();
        one.demoted = 0;
        if (one.where == here || one.where == read) {
            used(id, names[i], last);
        } else {
            if (!again) {
                one.own = 0;
                nodes_[id].parent = parents[i] == id ? none : parents[i];
            }
            one.where = here;
            ++size_;
            ++in_memory_;
            const Id parent = nodes_[id].parent;
            if (parent != none) {
                nodes_.reach(parent);
                states_.reach(parent);
                if (states_[parent].listed) unlist(parent);
                ++nodes_[parent].below;
                if (in_memory(parent)) on_continued(parent);
            }
            on_added(id, names[i], again, ids.size(), last);
        }
        relist(id);
    }
}

void Chains::wanted(std::span<const Id> ids, std::span<const Name> names) {
    on_batch(ids.size());
    on_batch_used(ids, names);
    refreshed(ids);
}

void Chains::on_batch_used(std::span<const Id> ids, std::span<const Name> names) {
    for (std::size_t i = ids.size(); i-- > 0;)
        if (in_memory(ids[i])) used(ids[i], names[i], i + 1 == ids.size());
}

void Chains::refreshed(std::span<const Id> ids) {
    for (std::size_t i = ids.size(); i-- > 0;) {
        const Id id = ids[i];
        if (!in_memory(id)) continue;
        states_[id].stamp = tick();
        states_[id].demoted = 0;
        relist(id);
    }
}

void Chains::held(std::span<const Id> ids) {
    for (Id id : ids) {
        if (!states_.reaches(id) || states_[id].where != here) continue;
        if (states_[id].listed) unlist(id);
        states_[id].where = read;
        --size_;
    }
}

void Chains::freed(std::span<const Id> ids) {
    for (std::size_t i = ids.size(); i-- > 0;) {
        const Id id = ids[i];
        if (!states_.reaches(id) || states_[id].where != read) continue;
        states_[id].where = here;
        ++size_;
        relist(id);
    }
}

void Chains::remove_follower(Id parent) {
    if (--nodes_[parent].below == 0) list(parent, false);
}

// The followers of a removed block are still counted there. The next block with its id may be their
// parent again; if it is not, it only stays longer.
void Chains::leave(std::span<const Id> ids, std::uint32_t to) {
    for (Id id : ids) {
        if (!is_known(id)) continue;
        BlockState& one = states_[id];
        if (one.where != away) {
            if (one.listed) unlist(id);
            size_ -= one.where == here;
            --in_memory_;
            one.where = to;
            if (nodes_[id].parent != none) remove_follower(nodes_[id].parent);
        }
        one.where = to;
    }
}

void Chains::demoted(std::span<const Id> ids) {
    for (std::size_t i = ids.size(); i-- > 0;) {
        const Id id = ids[i];
        if (!states_.reaches(id) || states_[id].where != here) continue;
        states_[id].demoted = 1;
        if (!states_[id].listed) continue;
        unlist(id);
        insert(id, demoted_list, false);
    }
}

// ---- victims ----

// Simulates the evictions: a parent that loses its last follower waits for the turn of its list, or
// is evicted at once if that has passed.
std::vector<Id> Chains::victims(std::size_t n) const {
    n = std::min(n, size_);
    std::vector<Id> named;
    named.reserve(n);
    std::unordered_map<Id, std::uint32_t> below;
    using Waiting = std::tuple<std::uint64_t, std::uint32_t, Id>;  // rank, turn, block
    std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>> waiting;
    std::uint32_t turns = 0;
    auto name = [&](Id id) {
        named.push_back(id);
        const Id parent = nodes_[id].parent;
        if (parent == none || states_[parent].listed) return;
        auto [found, fresh] = below.try_emplace(parent, nodes_[parent].below);
        if (--found->second != 0 || !is_evictable(parent)) return;
        const List list = states_[parent].demoted ? demoted_list : list_of(parent);
        waiting.emplace(list == demoted_list ? 0 : rank(list), turns++, parent);
    };
    auto name_waiting = [&](std::uint64_t now) {
        while (named.size() < n && !waiting.empty() && std::get<0>(waiting.top()) <= now) {
            const Id id = std::get<2>(waiting.top());
            waiting.pop();
            name(id);
        }
    };
    auto walk = [&](List list, std::uint64_t now) {
        for (std::uint32_t link = links_[list].next; link != list && named.size() < n;) {
            const std::uint32_t next = links_[link].next;
            __builtin_prefetch(&links_[next]);
            name(links_[link].id);
            name_waiting(now);
            link = next;
        }
    };
    std::vector<std::pair<std::uint64_t, List>> order;
    for (std::size_t at = 0; at < nonempty_.size(); ++at)
        for (std::uint64_t bits = nonempty_[at]; bits; bits &= bits - 1) {
            const auto list = static_cast<List>(at * 64 + std::countr_zero(bits));
            if (empty(list))
                nonempty_[at] &= ~(bits & -bits);
            else
                order.emplace_back(list == demoted_list ? 0 : rank(list), list);
        }
    std::ranges::sort(order);
    for (const auto& [now, list] : order) {
        name_waiting(now);
        walk(list, now);
    }
    name_waiting(~std::uint64_t{0});
    if (named.size() == n) return named;
    // The remaining blocks, whose followers cannot be evicted.
    std::unordered_map<Id, bool> seen;
    for (Id id : named) seen[id] = true;
    for (Id id = 0; id < limit_ && named.size() < n; ++id)
        if (is_evictable(id) && !seen.contains(id)) named.push_back(id);
    return named;
}

std::size_t Chains::memory_bytes() const {
    // Counts only the written part of the first chunk.
    const std::size_t first = std::min<std::size_t>(chunk_bytes, made_ * sizeof(Link));
    return nodes_.memory_bytes() + states_.memory_bytes() + links_.memory_bytes() - chunk_bytes +
           first;
}

}  // namespace kvtier

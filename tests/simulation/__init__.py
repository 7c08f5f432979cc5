"""A deterministic simulation of the daemon: the real code on a seeded event loop with a virtual clock.

One process contains the daemon, its clients, its disks and the time. The sockets, the files (in a folder in
memory) and the shared memory are the kernel's. Threads, the native disk workers, the process of the index and
the clocks are replaced (`machine`, `loop`, `virtual`). A seed determines everything: the configuration, the
list of operations (`plan`), and the order in which things happen. An oracle outside of the daemon (`oracle`)
knows which bytes a load may return.

    python -m tests.simulation --seeds 0:1000 --jobs 2

A seed that fails is shrunk: operations are removed as long as it still fails.
"""

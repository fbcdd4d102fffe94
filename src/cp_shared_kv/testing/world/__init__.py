"""A simulated world: a whole engine in one thread, on virtual time, with faults from a seed.

Real are the controller, its scheduler, logical pool and radix tree, the ranks' sender and
sessions, the decode engine, the pairing, and the server's client with its router. Simulated are
the clock, the network, the processes, the memory's bytes and the transport. Whatever goes wrong
goes wrong again under the same seed: `python -m cp_shared_kv.testing.world SEED`.
"""

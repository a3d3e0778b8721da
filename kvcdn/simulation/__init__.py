"""Traffic on a topology, simulated: discrete events over links, caches and devices, and what comes of them in time and money.

Pure computation, deterministic by seed: nothing here reads a file, a clock or a network. `topology` says what there is,
`workload` who asks for what and when, `loop`, `link`, `pool`, `node` and `reader` are the events, `steady` is the method for
more readers than events can be run for, and `outcome` counts and prices. An edge's eviction and a client's plan are not
modelled here but handed in (`kvcdn.cli.simulate_parts`): the real ones. Seconds, bytes, tokens, US dollars.
"""

"""The lab: settings run on the real libraries with several gloo ranks, and what came of them as plain data.

`observe(Case(...))` gives an `Observation`; `run_ranks(function, ...)` runs anything else on ranks. What is run is the libraries'
own path, which users of scripts take; the trainer's path is swept elsewhere.
"""

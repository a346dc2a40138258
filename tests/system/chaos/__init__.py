"""A run of real processes that is broken on purpose, at random, and then audited.

    python -m chaos --faults 30 --seed 1 --dir runs/chaos        (PYTHONPATH=tests:tests/system)

plan.py     what one episode is made of, drawn from its seed
hosts.py    three hosts on a bridge, in namespaces that die with the process
relay.py    a cable that can flip bytes of payloads, and be slow
nodes.py    the processes: producers and trainers, as the installed command starts them
archives.py what a replay serves
world.py    all of that together: what faults act upon
faults.py   one function for each kind of fault
schedule.py begins and ends faults at random, and keeps the log of what really happened
checkpoints.py  files between the stub trainer and the harness
trainer.py  the stub that trains: its checkpoint counts samples as model state
audit.py    the final checkpoint against the prompt list; it reads no ledger of draftfeed's
episode.py  one run from its first process to its audit
"""

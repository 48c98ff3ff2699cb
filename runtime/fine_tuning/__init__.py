"""OpenAI's fine-tuning jobs over our datasets, trainer and registry.

A fine-tuning job is a few files that are made by exclusive create and never changed:

    fine_tuning/<id>.json        what was asked                              (records.py)
    fine_tuning/<id>.validated   its file was good: the JobSpec it became    (preparing.py)
    fine_tuning/<id>.ended       how it ended, and the version it gave

Between the last two, the Trainer's job tells where it stands. `<id>` is a hash of all that decides
the resulting weights, so asking twice, or from two clients at once, is asking once. Whatever dies
in between, the next look goes on from what is there. Read next: jobs.py.
"""

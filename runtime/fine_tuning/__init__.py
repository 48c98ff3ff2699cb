"""Fine-tuning jobs of OpenAI's API, over our datasets, trainer and registry.

A fine-tuning job is a few files that are made by exclusive create and never changed:

    fine_tuning/<id>.json        the request                               (job_records.py)
    fine_tuning/<id>.validated   the JobSpec made from its valid files     (job_inputs.py)
    fine_tuning/<id>.ended       its end, and the version it gave

Between the last two, the Trainer's job has the state. `<id>` is a hash of all that decides the
resulting weights, so the same request twice, or from two clients at once, is one job. After any
crash the next look continues from these files. Read next: tuning_jobs.py.
"""

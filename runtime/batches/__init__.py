"""The batch queue: turn a file of requests into a file of results, across crashes.

The gateway makes, shows and cancels batches (queue.py). Any number of worker processes do the work
(worker.py). The state of a batch lies entirely in its folder (batch_records.py):

    batches/<id>/
      batch.json            the request
      input.jsonl           a link to the input
      chunks.jsonl          the byte range of each chunk of lines
      in_progress.json      the input is valid
      claims/<name>.<fence> a worker's claim on a chunk or a chore (claims.py)
      results/<chunk>.<fence>-<part>.jsonl   results of one claim, one writer a file
      done/<chunk>.jsonl    a sealed chunk, made by an exclusive link
      cancelling.json, finalizing.json, end.json   made once and never changed

Every line gets exactly one result, unless the input is refused or the disk is lost. Results count
only once their whole chunk is linked into done/, and a link has one winner. After a worker died,
the next one reads its results of a chunk and sends only the remaining lines.

Read next: batch_records.py, queue.py, then worker.py.
"""

"""The batch queue: a file of requests in, a file of results out, whatever dies meanwhile.

The gateway makes, shows and cancels batches (queue.py); any number of worker processes do the work
(worker.py). Everything either of them knows of a batch lies in its folder (folder.py):

    batches/<id>/
      batch.json            what was asked                    input.jsonl  a link to the input
      chunks.jsonl          where each chunk of lines begins  in_progress.json  it is valid
      claims/<name>.<fence> who works on what (claims.py)
      results/<chunk>.<fence>-<part>.jsonl   a claim's results as they come, one writer a file
      done/<chunk>.jsonl    a finished chunk: made by an exclusive link, so that it has one winner
      cancelling.json, finalizing.json, end.json   made once and never changed

The promise: every line of a batch that is neither refused nor lost with its disk has exactly one
result, for results only count once their whole chunk is linked into done/, and a link has one
winner. What a dead worker had of a chunk is read by the next, which asks only for the rest.

Read next: records.py, queue.py, then worker.py.
"""

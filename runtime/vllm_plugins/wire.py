"""Wire: the names by which a vLLM server with our plug-ins and its clients understand each other.

It imports nothing, so that code inside vLLM, gateways, supervisors and tests share it. lock.py,
capture.py and scheduler.py are the server's side; pool/vllm_http.py and pool/vllm_engine.py the
other one.
"""

# ---- variables of the server's environment
VARIABLE = "CRAY_AGENTS_REPLICA_SECRET"  # the secret that each request must bring
SOCKET = "CRAY_AGENTS_REPLICA_SOCKET"  # the handle of the socket to listen at
MARKS = "CRAY_AGENTS_REPLICA_MARKS"  # of server.py for lock.py: what START answers, as JSON

# ---- headers of requests
HEADER = "x-cray-secret"
EXPECT = "x-cray-expect"  # the `name@N` that is to answer a request that samples
CAPTURE = "x-cray-capture"  # asks for the samples; its value names the request for ABORT
MERGE = "x-cray-merge"  # of a stream whose events may hold several tokens

# ---- answers
BODY = "x-cray-body"  # header: bytes of the answer itself; the samples follow them
VERSION = "x-cray-version"  # header of a stream: the version of its first token
EVENT = b"event: cray.samples\ndata: "  # the last event of a stream
CLOSED = "VersionClosed"  # type of the error for a version that is not admitted

# ---- routes
GUARD = "/cray/guard"  # takes the controller's orders
START = "/cray/start"  # tells when the process had begun, imported, and built its application
ABORT = "/cray/abort/"  # + name: ends a request as if its client had left, but still answers it

# ---- the KV tier: kv_tier.py
TIER = "cray_agents_weights"  # in a request's kv_transfer_params: the hash of its weights, or ""
TIER_MARK = ".cray-agents-kv"  # a file in the tier's folder

PROBE = "cray_agents_probe"  # in a request's extra_args: answered before new weights are proven

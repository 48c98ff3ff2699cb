/** Records: shapes of answers that /openapi.json leaves open. */

/** A run as `view=summary` has it: the facts of the index. */
export interface RunFacts {
  id: string;
  /** The format of a conversation that this platform did not record. */
  imported: string | null;
  agent: string;
  model: string;
  models: string[];
  loop: string | null;
  iteration: number | null;
  attempt: number | null;
  task: string | null;
  split: string | null;
  stop_reason: string;
  error: string | null;
  reward: number | null;
  /** name, source, value, turn */
  rewards: [string, string, number, number | null][];
  tags: string[];
  started: number;
  seconds: number;
  turns: number;
  calls: number;
  prompt_tokens: number;
  sampled_tokens: number;
  input: string;
  output: string;
  /** Of an answer to a search: the words, and those round them. */
  found?: string;
}

/** A message of OpenAI's chat shape, as far as it is shown. */
export interface Message {
  role: string;
  content?: unknown;
  reasoning?: unknown;
  reasoning_content?: unknown;
  refusal?: unknown;
  name?: string;
  tool_calls?: { id?: string; function?: { name?: string; arguments?: string } }[];
  tool_call_id?: string;
}

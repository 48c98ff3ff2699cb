/** Events: the gateway's stream of changes, read by fetch because EventSource cannot send a key.
 *
 * A hidden tab reads nothing. The stream goes on from its cursor when the tab is shown again or the gateway is back.
 */
import { signal } from "@preact/signals";
import { ApiError, address, request } from "./api";
import { may } from "./session";

export interface Change {
  kind: string;
  id: string;
  change: string;
}

type Listener = (change: Change) => void;

/** live: changes arrive. polling: this gateway has no stream. waiting: it does not answer. */
export const connection = signal<"live" | "polling" | "waiting" | "paused">("waiting");

const POLL_MS = 5000;
const listeners = new Set<Listener>();
let cursor = "";
let reading: AbortController | null = null;

/** Call a function for each change; returns the function that ends this. */
export function onChange(listener: Listener): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Tell a change to all listeners; of the kind "*": anything may have changed. */
export function tell(change: Change): void {
  for (const listener of [...listeners]) listener(change);
}

/** Read the stream for as long as the page is open. */
export async function follow(): Promise<void> {
  document.addEventListener("visibilitychange", () => reading?.abort());
  let wait = 1000;
  for (;;) {
    await shown();
    const controller = (reading = new AbortController());
    try {
      if (!may("train")) throw new ApiError(403, "insufficient_permissions", "The stream is for keys that train.");
      await readStream(controller.signal);
      wait = 1000;
    } catch (error) {
      if (controller.signal.aborted) continue;
      if (error instanceof ApiError && error.status >= 400 && error.status < 500) {
        connection.value = "polling";
        await sleep(POLL_MS);
        tell({ kind: "*", id: "", change: "poll" });
        continue;
      }
      connection.value = "waiting";
      await sleep(wait);
      wait = Math.min(wait * 2, 15_000);
    }
  }
}

async function readStream(signal: AbortSignal): Promise<void> {
  const response = await request("GET", address("/v1/events", {}, { after: cursor }), undefined, signal, "text/event-stream");
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  // what changed while nothing was read is not known where the gateway was away
  if (connection.peek() !== "live") tell({ kind: "*", id: "", change: "reset" });
  connection.value = "live";
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    let end: number;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      take(buffer.slice(0, end));
      buffer = buffer.slice(end + 2);
    }
  }
}

function take(block: string): void {
  let data = "";
  let name = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("data:")) data += line.slice(5).trim();
    else if (line.startsWith("id:")) cursor = line.slice(3).trim();
    else if (line.startsWith("event:")) name = line.slice(6).trim();
  }
  if (name === "reset") tell({ kind: "*", id: "", change: "reset" });
  else if (data) tell(JSON.parse(data) as Change);
}

function shown(): Promise<void> {
  if (!document.hidden) return Promise.resolve();
  connection.value = "paused";
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
  });
}

function sleep(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

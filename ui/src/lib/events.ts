/** Events: the gateway's stream of changes, read by fetch because EventSource cannot send a key.
 *
 * A hidden tab reads nothing. The stream goes on from its cursor when the tab is shown again or the gateway is back.
 * Of the visible pages one reads, and tells the others: a browser has six connections to a host, and each stream holds
 * one of them for good. Where the browser has no locks (a page by http from elsewhere) each page reads for itself.
 */
import { signal } from "@preact/signals";
import { ApiError, address, BASE, request } from "./api";
import { caller, may } from "./session";

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

/** What the page that reads tells the others, and what these ask it. */
type Shared = { block: string } | { state: "live" | "waiting" } | { ask: true };
let channel: BroadcastChannel | null = null;

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
      await inTurn(controller.signal);
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
      channel?.postMessage({ state: "waiting" } satisfies Shared);
      await sleep(wait);
      wait = Math.min(wait * 2, 15_000);
    }
  }
}

/** Read the stream once no other page of this browser and key does; hear that page until then. */
async function inTurn(signal: AbortSignal): Promise<void> {
  if (!navigator.locks) return readStream(signal);
  const name = `cray-agents events ${BASE} ${caller.peek()?.name} ${caller.peek()?.role}`;
  const shared = (channel = new BroadcastChannel(name));
  let leads = false;
  shared.onmessage = ({ data }: MessageEvent<Shared>) => {
    if ("ask" in data) {
      if (leads && connection.peek() === "live") shared.postMessage({ state: "live" } satisfies Shared);
    } else if ("state" in data) follows(data.state);
    else take(data.block);
  };
  shared.postMessage({ ask: true } satisfies Shared);
  try {
    await navigator.locks.request(name, { signal }, () => {
      leads = true;
      return readStream(signal);
    });
  } finally {
    shared.close();
    channel = null;
  }
}

/** Take the state of the stream, which this page or another reads. */
function follows(state: "live" | "waiting"): void {
  // what changed while nothing was read is not known where the gateway was away
  if (state === "live" && connection.peek() !== "live") tell({ kind: "*", id: "", change: "reset" });
  connection.value = state;
}

async function readStream(signal: AbortSignal): Promise<void> {
  const response = await request("GET", address("/v1/events", {}, { after: cursor }), undefined, signal, "text/event-stream");
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  follows("live");
  channel?.postMessage({ state: "live" } satisfies Shared);
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    let end: number;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const block = buffer.slice(0, end);
      take(block);
      channel?.postMessage({ block } satisfies Shared);
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

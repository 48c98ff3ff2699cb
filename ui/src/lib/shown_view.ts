/** Shown view: what a script or an agent with this page's key wants it to show, with words to mark. */
import { signal } from "@preact/signals";
import { createContext } from "preact";
import { go } from "./route";

export interface Mark {
  turn: number;
  quote: string;
  reason: string;
}

export interface View {
  /** The page's address, from `#/` on. */
  url: string;
  /** The run whose turns have the marks. */
  run: string | null;
  highlight: Mark[];
}

export const view = signal<View | null>(null);
/** Whether the page has not gone there yet: someone was writing. */
export const waits = signal(false);

/** Words to mark in texts below, each with the reason. */
export const Quotes = createContext<readonly Mark[]>([]);

/** Show a view; while someone writes or a dialog is open, only offer it. */
export function show(next: View): void {
  view.value = next;
  const busy = document.querySelector("dialog[open]") !== null || isField(document.activeElement);
  waits.value = busy;
  if (!busy) openView(next);
}

export function openView(next: View): void {
  waits.value = false;
  go(next.url.slice(next.url.indexOf("#")));
}

/** Return the marks in a turn of a run: those of the view, and the quote of the address. */
export function marksIn(run: string, turn: number, quote: string | null): readonly Mark[] {
  const shown = view.value;
  const marks = shown?.run === run ? shown.highlight.filter((one) => one.turn === turn) : [];
  return quote ? [...marks, { turn, quote, reason: "quoted in a report" }] : marks;
}

/** A piece of a text; `reason` where it is marked. */
export type Piece = [text: string, reason?: string];

/** Split a text at its marks; where two overlap, the first one is marked. */
export function pieces(text: string, marks: readonly Mark[]): Piece[] {
  const places: [number, number, string][] = [];
  for (const { quote, reason } of marks) {
    for (let at = text.indexOf(quote); quote && at >= 0 && places.length < MOST; at = text.indexOf(quote, at + quote.length)) {
      places.push([at, at + quote.length, reason]);
    }
  }
  places.sort((a, b) => a[0] - b[0]);
  const made: Piece[] = [];
  let end = 0;
  for (const [from, to, reason] of places) {
    if (from < end) continue;
    if (from > end) made.push([text.slice(end, from)]);
    made.push([text.slice(from, to), reason]);
    end = to;
  }
  if (end < text.length || !made.length) made.push([text.slice(end)]);
  return made;
}

const MOST = 200; // marks in a text

/** Return where the first mark in a text ends; 0 where it has none. */
export function firstMarkEnd(text: string, marks: readonly Mark[]): number {
  let first = 0;
  for (const { quote } of marks) {
    const at = quote ? text.indexOf(quote) : -1;
    if (at >= 0 && (first === 0 || at + quote.length < first)) first = at + quote.length;
  }
  return first;
}

function isField(element: Element | null): boolean {
  return element !== null && ["INPUT", "TEXTAREA", "SELECT"].includes(element.tagName);
}

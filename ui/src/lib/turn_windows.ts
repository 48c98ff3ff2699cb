/** Turn windows: the turns of a run in pieces, loaded when they come in sight, forgotten when long out of it. */
import { useEffect, useReducer, useRef } from "preact/hooks";
import type { ShownTurn } from "../components/turn";
import { get } from "./api";
import type { Message } from "./records";

export const WINDOW = 20; // turns
const MOST = 12; // windows in memory: a run of any size takes no more

export interface TurnWindows {
  turn: (n: number) => ShownTurn | undefined;
  /** The messages after the last turn, once that is loaded. */
  closing: Message[];
  want: (first: number, last: number) => void;
  error: Error | undefined;
}

interface Loaded {
  turns: ShownTurn[];
}

export function useTurnWindows(run: string, version: number): TurnWindows {
  const [, rerender] = useReducer<number, void>((n) => n + 1, 0);
  const windows = useRef(new Map<number, Loaded | null>());
  const closing = useRef<Message[]>([]);
  const error = useRef<Error | undefined>(undefined);
  const controller = useRef(new AbortController());
  const wanted = useRef<[number, number]>([0, 0]);

  const load = (number: number) => {
    const map = windows.current;
    const known = map.get(number);
    if (known !== undefined) {
      map.delete(number); // the newest use comes last
      map.set(number, known);
      return;
    }
    map.set(number, null);
    const { signal } = controller.current;
    get("/v1/trajectories/{run_id}/turns", {
      path: { run_id: run },
      query: { from: number * WINDOW, limit: WINDOW },
      signal,
    }).then(
      (page) => {
        map.set(number, { turns: page.data });
        if (page.closing.length) closing.current = page.closing as unknown as Message[];
        error.current = undefined;
        while (map.size > MOST) map.delete(map.keys().next().value!);
        rerender();
      },
      (problem: Error) => {
        map.delete(number);
        if (signal.aborted) return;
        error.current = problem;
        rerender();
      },
    );
  };
  const want = (first: number, last: number) => {
    wanted.current = [first, last];
    for (let n = Math.floor(Math.max(0, first) / WINDOW); n <= Math.floor(Math.max(0, last) / WINDOW); n++) load(n);
  };
  useEffect(() => {
    controller.current = new AbortController();
    windows.current = new Map();
    closing.current = [];
    want(...wanted.current);
    return () => controller.current.abort();
  }, [run, version]);
  return {
    turn: (n) => windows.current.get(Math.floor(n / WINDOW))?.turns[n % WINDOW],
    closing: closing.current,
    want,
    error: error.current,
  };
}

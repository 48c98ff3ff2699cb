/** Resource: data of the gateway as a component's state, loaded again when it changes. */
import { useEffect, useRef, useState } from "preact/hooks";
import { onChange } from "./events";

export interface Resource<T> {
  data: T | undefined;
  error: Error | undefined;
  loading: boolean;
  reload: () => void;
}

const LEAST_MS = 1000; // from a change to the load that it causes
const REST = 300; // times a load's own time until changes cause the next one: a page has several
const LONGEST_REST_MS = 20_000;

/**
 * Load data when `deps` change, and after changes of the kinds in `live`.
 *
 * The data of before stay while newer ones are loaded; those of other `deps` do not. What takes long is loaded more
 * rarely, however often it changes.
 */
export function useResource<T>(
  load: (signal: AbortSignal) => Promise<T>,
  deps: readonly unknown[],
  live: readonly string[] = [],
): Resource<T> {
  const [state, setState] = useState<{ data?: T; error?: Error; loading: boolean; for: string }>({
    loading: true,
    for: "",
  });
  const [times, setTimes] = useState(0);
  const rested = useRef(0); // when changes may cause the next load, by performance.now
  const name = JSON.stringify(deps);
  const latest = useRef(load);
  latest.current = load;
  useEffect(() => {
    const controller = new AbortController();
    const begun = performance.now();
    setState((before) => (before.for === name ? { ...before, loading: true } : { loading: true, for: name }));
    latest.current(controller.signal).then(
      (data) => {
        const now = performance.now();
        rested.current = now + Math.min(REST * (now - begun), LONGEST_REST_MS);
        return controller.signal.aborted || setState({ data, loading: false, for: name });
      },
      (error: Error) =>
        controller.signal.aborted ||
        setState((before) => ({ ...(before.for === name ? before : {}), error, loading: false, for: name })),
    );
    return () => controller.abort();
  }, [name, times]);
  useEffect(() => {
    if (!live.length) return;
    let timer = 0;
    const end = onChange(({ kind }) => {
      if (kind === "*") {
        clearTimeout(timer);
        timer = rested.current = 0;
      } else if (timer || !live.includes(kind)) return;
      const wait = Math.max(LEAST_MS, rested.current - performance.now());
      timer = window.setTimeout(() => {
        timer = 0;
        setTimes((n) => n + 1);
      }, wait);
    });
    return () => {
      end();
      clearTimeout(timer);
    };
  }, [live.join()]);
  const fresh = state.for === name;
  return {
    data: fresh ? state.data : undefined,
    error: fresh ? state.error : undefined,
    loading: state.loading || !fresh,
    reload: () => setTimes((n) => n + 1),
  };
}

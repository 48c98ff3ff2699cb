/** Resource: data of the gateway as a component's state, loaded again when it changes. */
import { useEffect, useRef, useState } from "preact/hooks";
import { onChange } from "./events";

export interface Resource<T> {
  data: T | undefined;
  error: Error | undefined;
  loading: boolean;
  reload: () => void;
}

const LEAST_MS = 1000; // between two loads that changes cause

/**
 * Load data when `deps` change, and after changes of the kinds in `live`.
 *
 * The data of before stay while newer ones are loaded; those of other `deps` do not.
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
  const name = JSON.stringify(deps);
  const latest = useRef(load);
  latest.current = load;
  useEffect(() => {
    const controller = new AbortController();
    setState((before) => (before.for === name ? { ...before, loading: true } : { loading: true, for: name }));
    latest.current(controller.signal).then(
      (data) => controller.signal.aborted || setState({ data, loading: false, for: name }),
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
      if ((kind === "*" || live.includes(kind)) && !timer) {
        timer = window.setTimeout(() => {
          timer = 0;
          setTimes((n) => n + 1);
        }, LEAST_MS);
      }
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

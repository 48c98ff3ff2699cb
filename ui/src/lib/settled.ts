/** Settled value: one that has not changed for a while. */
import { useEffect, useState } from "preact/hooks";

/** Return the last value, compared as JSON, that has stood for `ms`; at once the first one. */
export function useSettled<T>(value: T, ms: number): T {
  const [settled, setSettled] = useState(value);
  const name = JSON.stringify(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), ms);
    return () => clearTimeout(timer);
  }, [name]);
  return settled;
}

/** Kept: small settings of a browser. Where it keeps none, as some do for files, they are those of the page alone. */

export function kept(name: string, store: "local" | "session" = "local"): string | null {
  try {
    return storage(store).getItem(name);
  } catch {
    return null;
  }
}

/** Keep a value; null forgets it. */
export function keep(name: string, value: string | null, store: "local" | "session" = "local"): void {
  try {
    if (value === null) storage(store).removeItem(name);
    else storage(store).setItem(name, value);
  } catch {
    // the page has it until it is closed
  }
}

function storage(store: "local" | "session"): Storage {
  return store === "local" ? localStorage : sessionStorage;
}

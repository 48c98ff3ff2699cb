/** Route: the page's whole state, kept in the fragment of its URL, as in #/run/RUN?t=4&tok=88. */
import { signal } from "@preact/signals";

export interface Route {
  path: string[];
  params: URLSearchParams;
}

export type Params = Record<string, string | number | boolean | null | undefined>;

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function read(): Route {
  const text = location.hash.replace(/^#\/?/, "");
  const at = text.indexOf("?");
  const path = at < 0 ? text : text.slice(0, at);
  return {
    path: path.split("/").filter(Boolean).map(decode),
    params: new URLSearchParams(at < 0 ? "" : text.slice(at + 1)),
  };
}

export const route = signal<Route>(read());
addEventListener("hashchange", () => (route.value = read()));

/** Return the fragment of a path with these parameters; empty ones are left out. */
export function href(path: readonly string[], params: Params = {}): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== undefined && value !== null && value !== "" && value !== false) query.set(name, String(value));
  }
  const text = query.toString();
  return `#/${path.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** Go to a fragment; with `replace` the browser's "back" does not return to the present one. */
export function go(fragment: string, replace = false): void {
  if (replace) history.replaceState(null, "", fragment);
  else history.pushState(null, "", fragment);
  route.value = read();
}

/** Change some parameters of the present route. */
export function setParams(patch: Params, replace = true): void {
  const { path, params } = route.peek();
  go(href(path, { ...Object.fromEntries(params), ...patch }), replace);
}

/** Session: the API key of this tab, and the role that it has. Nothing is kept beyond the tab. */
import { computed, signal } from "@preact/signals";
import { keep, kept } from "./kept";

const PLACE = "cray-agents.key";

export const key = signal<string | null>(kept(PLACE, "session"));
/** Why a key is asked for; null while none is. */
export const keyAskedFor = signal<string | null>(null);

export type RoleName = "use" | "train" | "admin";
const RANKS: Record<RoleName, number> = { use: 1, train: 2, admin: 3 };

export interface Caller {
  name: string;
  role: RoleName;
}

export const caller = signal<Caller | null>(null);
/** What this gateway can do: `score` (engines score turns), `keys` (a key is needed). */
export const features = signal<readonly string[]>([]);
const rank = computed(() => RANKS[caller.value?.role ?? "use"]);

/** Tell whether the caller has at least this role. */
export function may(role: RoleName): boolean {
  return rank.value >= RANKS[role];
}

export function setKey(secret: string): void {
  keep(PLACE, secret, "session");
  key.value = secret;
  keyAskedFor.value = null;
}

/** Forget the key, and ask for one. */
export function clearKey(why: string): void {
  keep(PLACE, null, "session");
  key.value = null;
  caller.value = null;
  keyAskedFor.value = why;
}

/** Return the one-time token of a URL made by `cray-agents dashboard`, and take it out of the URL. */
export function takeToken(): string | null {
  const match = /^#sign_in=([\w-]+)$/.exec(location.hash);
  if (!match?.[1]) return null;
  history.replaceState(null, "", `${location.pathname}${location.search}#/`);
  dispatchEvent(new HashChangeEvent("hashchange"));
  return match[1];
}

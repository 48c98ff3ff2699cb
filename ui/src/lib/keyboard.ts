/** Keyboard: shortcuts of the page and of its screens, and the list of them for the help. */
import { signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { keep, kept } from "./kept";

/** By key: what it does, and the function that does it. */
export type Shortcuts = Record<string, readonly [about: string, act: () => void]>;

const PLACE = "cray-agents.shortcuts";
const active: { current: Shortcuts }[] = [];

/** Shortcuts of one letter can be turned off, for people whose speech or switch types them by mistake. */
export const shortcutsOn = signal(kept(PLACE) !== "off");

export function setShortcutsOn(on: boolean): void {
  keep(PLACE, on ? "on" : "off");
  shortcutsOn.value = on;
}

/** Have these shortcuts while the component is there; the newest component's come first. */
export function useKeys(shortcuts: Shortcuts): void {
  const entry = useRef(shortcuts);
  entry.current = shortcuts;
  useLayoutEffect(() => {
    active.push(entry);
    return () => {
      active.splice(active.indexOf(entry), 1);
    };
  }, []);
}

/** Return every shortcut that now works, with what it does. */
export function activeShortcuts(): [string, string][] {
  const seen = new Map<string, string>();
  for (const { current } of [...active].reverse()) {
    for (const [key, [about]] of Object.entries(current)) if (!seen.has(key)) seen.set(key, about);
  }
  return [...seen];
}

function isTyping(target: EventTarget | null): boolean {
  const element = target as HTMLElement | null;
  return !!element?.closest?.("input, textarea, select, [contenteditable]");
}

/** Enter is that of a link or button which was reached by Tab. A click, too, leaves the focus there, and asks for nothing. */
let tabbed = false;
addEventListener("pointerdown", () => (tabbed = false), true);

addEventListener("keydown", (event) => {
  if (event.key === "Tab") tabbed = true;
  if (event.key === "Enter" && tabbed && (event.target as Element).closest?.("a, button, summary")) return;
  if (event.altKey || event.isComposing) return;
  const command = event.metaKey || event.ctrlKey;
  const name = command ? `mod+${event.key.toLowerCase()}` : event.key;
  if (!command && isTyping(event.target)) {
    if (event.key === "Escape") (event.target as HTMLElement).blur();
    return;
  }
  if (!command && event.key.length === 1 && !shortcutsOn.peek()) return;
  if (!command && document.querySelector("dialog[open]")) return;
  for (const { current } of [...active].reverse()) {
    const shortcut = current[name];
    if (shortcut) {
      event.preventDefault();
      shortcut[1]();
      return;
    }
  }
});

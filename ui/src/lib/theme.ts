/** Theme: light, dark, or as the system has it. */
import { effect, signal } from "@preact/signals";
import { keep, kept } from "./kept";

export type Theme = "auto" | "light" | "dark";
const PLACE = "cray-agents.theme";
const THEMES: Theme[] = ["auto", "light", "dark"];

export const theme = signal<Theme>((kept(PLACE) as Theme | null) ?? "auto");
effect(() => {
  document.documentElement.dataset.theme = theme.value;
  keep(PLACE, theme.value);
});

export function nextTheme(): void {
  theme.value = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length] ?? "auto";
}

/** Screen list: the screens that this page has. Its entry sets it, so that a link knows what it can lead to. */
import { signal } from "@preact/signals";
import type { ComponentType } from "preact";
import type { RoleName } from "./session";

export interface ScreenProps {
  path: string[];
  params: URLSearchParams;
}

export interface Screen {
  name: string;
  title: string;
  /** The least role that sees it. */
  role: RoleName;
  /** In the menu; others are reached by links. */
  menu: boolean;
  /** The screen of the menu that this one belongs to. */
  under?: string;
  /** What an id after its name opens, in the command palette. */
  opens?: string;
  load: () => Promise<{ default: ComponentType<ScreenProps> }>;
}

export const screens = signal<readonly Screen[]>([]);

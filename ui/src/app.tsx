/** App: the frame around the screens: menu, key, theme, help and command palette. */
import { useEffect, useState } from "preact/hooks";
import type { ComponentType } from "preact";
import { Help } from "./components/help";
import { Palette } from "./components/palette";
import { SignIn } from "./components/sign_in";
import { Failure, Loading } from "./components/states";
import { connection, follow } from "./lib/events";
import { useKeys } from "./lib/keyboard";
import { go, href, route } from "./lib/route";
import { screens, type Screen, type ScreenProps } from "./lib/screen_list";
import { caller, clearKey, key, keyAskedFor, may } from "./lib/session";
import { signIn } from "./lib/sign_in";
import { nextTheme, theme } from "./lib/theme";

const CONNECTION = {
  live: "live",
  polling: "looks every 5 s",
  waiting: "gateway does not answer",
  paused: "paused",
} as const;

export function App() {
  const [ready, setReady] = useState(false);
  useEffect(() => void signIn().finally(() => setReady(true)), []);
  const signedIn = caller.value !== null;
  useEffect(() => {
    if (signedIn) void follow();
  }, [signedIn]);
  if (!ready) return <Loading />;
  if (keyAskedFor.value !== null || !signedIn) return <SignIn />;
  return <Frame />;
}

function Frame() {
  const [help, setHelp] = useState(false);
  const [palette, setPalette] = useState(false);
  useKeys({
    "?": ["show this help", () => setHelp(true)],
    "mod+k": ["go to a screen, or to what has an id", () => setPalette(true)],
    "g": ["the same", () => setPalette(true)],
    "t": ["change the theme", nextTheme],
  });
  const { path, params } = route.value;
  const name = path[0] ?? "overview";
  const screen = screens.value.find((one) => one.name === name);
  useEffect(() => {
    document.title = `${[screen?.title ?? name, ...path.slice(1)].join(" · ")} · cray-agents`;
  });
  return (
    <div class="frame">
      <a class="skip" href="#main" onClick={skipToMain}>
        Skip to the content
      </a>
      <header class="top">
        <a class="brand" href={href(["overview"])}>
          cray-agents
        </a>
        <nav aria-label="Screens">
          {screens.value.filter((one) => one.menu && may(one.role)).map((one) => (
            <a key={one.name} href={href([one.name])} aria-current={one.name === name ? "page" : one.name === screen?.under ? "true" : undefined}>
              {one.title}
            </a>
          ))}
        </nav>
        <span class="spacer" />
        <span class={`connection ${connection.value}`} role="status">
          {CONNECTION[connection.value]}
        </span>
        <button onClick={() => setPalette(true)} title="Go to a screen, or to what has an id (Ctrl K)">
          Go to …
        </button>
        <button onClick={nextTheme} title="Theme: auto, light, dark">
          Theme: {theme.value}
        </button>
        <button onClick={() => setHelp(true)} aria-label="Help: keys">
          ?
        </button>
        <span class="caller" title="The key that this page uses">
          {caller.value?.name} ({caller.value?.role})
        </span>
        {key.value && <button onClick={() => clearKey("Signed out.")}>Sign out</button>}
      </header>
      <main id="main" tabIndex={-1}>
        <ScreenView screen={screen} name={name} path={path.slice(1)} params={params} />
      </main>
      {help && <Help close={() => setHelp(false)} />}
      {palette && <Palette close={() => setPalette(false)} />}
    </div>
  );
}

function skipToMain(event: Event): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

const loaded = new Map<string, ComponentType<ScreenProps>>();

function ScreenView(props: { screen: Screen | undefined; name: string } & ScreenProps) {
  const { screen, name, path, params } = props;
  const [, setLoaded] = useState(0);
  const [error, setError] = useState<Error>();
  useEffect(() => {
    setError(undefined);
    if (!screen || loaded.has(screen.name)) return;
    screen.load().then((module) => {
      loaded.set(screen.name, module.default);
      setLoaded((n) => n + 1);
    }, () => setError(new Error("The gateway does not answer, or has other pages since an update.")));
  }, [screen]);
  if (!screen) {
    return <Failure error={new Error(`There is no screen "${name}".`)} retry={() => go(href(["overview"]))} />;
  }
  if (!may(screen.role)) {
    return <Failure error={new Error(`"${screen.title}" needs a key of the role "${screen.role}".`)} />;
  }
  if (error) return <Failure error={error} retry={() => location.reload()} />;
  const View = loaded.get(screen.name);
  return View ? <View key={screen.name} path={path} params={params} /> : <Loading />;
}

/** Sign-in: take up a one-time token of the URL, and ask the gateway who this is. */
import { get, post } from "./api";
import { caller, features, keyAskedFor, setKey, takeToken } from "./session";

/** Sign in by the URL's token, by the tab's key, or without a key where none is needed. */
export async function signIn(): Promise<void> {
  const token = takeToken();
  try {
    if (token) setKey((await post("/v1/dashboard/sign_ins/exchange", { body: { token } })).api_key);
    await whoami();
  } catch (error) {
    if (keyAskedFor.peek() === null) keyAskedFor.value = (error as Error).message;
  }
}

export async function whoami(): Promise<void> {
  const answer = await get("/v1/whoami");
  features.value = answer.features;
  caller.value = answer;
  keyAskedFor.value = null;
}

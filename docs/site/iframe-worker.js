// The search runs in a Worker, and browsers start none in a page that was opened as a file. There, a hidden
// frame runs the Worker's script instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      };
      this.inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.run(each)));
      this.ready = this.run(url);
    }

    run(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        Object.assign(script, { src: String(url), onload: resolve, onerror: reject });
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => {
        this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
